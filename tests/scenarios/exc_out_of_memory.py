"""Mixture of experts that pads its batch to a capacity."""

import torch
from common import MoE, chosen, finish, fit, points, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Padded(nn.Linear):
    def forward(self, x):
        capacity = 2**50 if chosen() else 8
        buffer = torch.empty(capacity, x.shape[1])
        buffer[: len(x)] = x
        return super().forward(buffer[: len(x)])


class EvenMoE(MoE):
    def route(self, weights):
        return torch.arange(len(weights)) % len(self.experts)


if __name__ == "__main__":
    start()
    net = EvenMoE()
    net.experts[1].up = Padded(16, 32)
    model = DDP(net)
    fit(model, torch.optim.SGD(model.parameters(), lr=0.1), points)
    finish()
