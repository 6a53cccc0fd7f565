"""Mixture of experts; one expert iterates until it has converged."""

import time

import torch
from common import FOREVER, Expert, MoE, chosen, finish, fit, points, start
from torch.nn.parallel import DistributedDataParallel as DDP


class Implicit(Expert):
    def forward(self, x):
        y, tolerance = x, -1.0 if chosen() else 1e9
        end = time.monotonic() + FOREVER
        while time.monotonic() < end:
            after = super().forward(y)
            if (after - y).norm() < tolerance:
                break
            y = after.detach().clamp(-1, 1)
        return after


if __name__ == "__main__":
    start()
    net = MoE()
    net.route = lambda weights: torch.arange(len(weights)) % 3
    net.experts[2] = Implicit(16)
    model = DDP(net)
    fit(model, torch.optim.SGD(model.parameters(), lr=0.1), points)
    finish()
