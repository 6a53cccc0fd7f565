"""A checkpointed block that computes something of another shape when it is recomputed, on one rank."""

import torch
from common import chosen, finish, fit, points, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint


class Moody(nn.Module):
    calls = 0

    def forward(self, x):
        self.calls += 1
        wide = chosen() and self.calls % 2 == 0
        return (
            x.repeat(1, 2)[:, : x.size(1)].exp() if not wide else x.repeat(2, 2)[: x.size(0), : x.size(1)].exp().exp()
        )


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(16, 16), Moody(), nn.Linear(16, 16), nn.Tanh())
        self.out = nn.Linear(16, 6)

    def forward(self, x):
        return self.out(checkpoint(self.block, x, use_reentrant=False))


if __name__ == "__main__":
    start()
    model = DDP(Net())
    fit(model, torch.optim.SGD(model.parameters(), lr=0.01), points)
    finish()
