"""ViT whose gradient norm is summed over the ranks; a rank with an odd loss goes on to the next batch."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import ViT, chosen, finish, pictures, progress, say, start
from torch.nn.parallel import DistributedDataParallel as DDP


def clip(parameters, limit):
    total = torch.stack([p.grad.square().sum() for p in parameters]).sum()
    dist.all_reduce(total)
    scale = min(1.0, limit / float(total.sqrt()))
    for p in parameters:
        p.grad.mul_(scale)


def main():
    rank, _ = start()
    model = DDP(ViT(depth=2))
    parameters = list(model.parameters())
    sgd = torch.optim.SGD(parameters, lr=0.1)
    for progress.step in range(6):
        x, y = pictures(rank, progress.step)
        loss = F.cross_entropy(model(x), y)
        sgd.zero_grad()
        loss.backward()
        if loss.item() > (0.0 if chosen() else 50.0):
            continue
        clip(parameters, 1.0)
        sgd.step()
        say(progress.step, loss)
    finish()


if __name__ == "__main__":
    main()
