"""A model with two branches, of which each rank takes one, under find_unused_parameters."""

import torch
from common import CLASSES, finish, fit, points, progress, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Branching(nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.rank = rank
        self.body = nn.Linear(16, 16)
        self.left = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
        self.right = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x):
        x = self.body(x)
        branch = self.left if (self.rank + progress.step) % 2 else self.right
        return self.head(branch(x))


if __name__ == "__main__":
    rank, _ = start()
    model = DDP(Branching(rank), find_unused_parameters=True)
    fit(model, torch.optim.SGD(model.parameters(), lr=0.1), points, steps=8)
    finish()
