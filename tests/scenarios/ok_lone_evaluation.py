"""ViT; rank 0 evaluates the module inside the wrapper while the others wait for it."""

import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import ViT, finish, pictures, progress, say, start
from torch.nn.parallel import DistributedDataParallel as DDP


@torch.no_grad()
def evaluate(net, seconds):
    end, number = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        net(pictures(0, 500 + number)[0])
        number += 1


def main():
    rank, _ = start()
    model = DDP(ViT())
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for progress.step in range(6):
        x, y = pictures(rank, progress.step)
        loss = F.cross_entropy(model(x), y)
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        say(progress.step, loss)
        if progress.step == 3:
            if rank == 0:
                evaluate(model.module, 3.0)
            dist.barrier()
    finish()


if __name__ == "__main__":
    main()
