"""ViT with a module that takes long in forward on one rank."""

import time

import torch
from common import ViT, finish, fit, here, job_step, pictures, progress, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Tuned(nn.Module):
    def forward(self, x):
        end = time.perf_counter() + (0.06 if here() and progress.step >= job_step(6) else 0.0)
        y = x * 1.0
        while time.perf_counter() < end:
            y = x * 1.0
        return y


if __name__ == "__main__":
    start()
    net = ViT()
    net.layers[0].extra = Tuned()
    model = DDP(net)
    fit(model, torch.optim.SGD(model.parameters(), lr=0.1), pictures, steps=25)
    finish()
