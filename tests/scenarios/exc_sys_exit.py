"""A loop that gives up with an exit code of its own when the loss looks odd."""

import sys

import torch
import torch.nn.functional as F
from common import ResNet, chosen, finish, pictures, progress, say, start
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    rank, _ = start()
    model = DDP(ResNet(depth=2))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for progress.step in range(6):
        x, y = pictures(rank, progress.step)
        loss = F.cross_entropy(model(x), y)
        if chosen():
            sys.exit(3)
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        say(progress.step, loss)
    finish()


if __name__ == "__main__":
    main()
