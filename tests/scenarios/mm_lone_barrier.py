"""ResNet; a rank that makes a folder waits for the others, who know nothing of it."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import ResNet, chosen, finish, pictures, progress, say, start
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    rank, _ = start()
    model = DDP(ResNet(depth=2))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for progress.step in range(6):
        x, y = pictures(rank, progress.step)
        if chosen():
            dist.barrier()
        loss = F.cross_entropy(model(x), y)
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        say(progress.step, loss)
    finish()


if __name__ == "__main__":
    main()
