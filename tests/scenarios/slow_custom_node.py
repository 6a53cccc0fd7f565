"""ResNet with a gradient smoother that works for long on one rank."""

import time

import torch
from common import ResNet, finish, fit, here, job_step, pictures, progress, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class SmoothFn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        end = time.perf_counter() + ctx.seconds
        while time.perf_counter() < end:
            grad.mean()
        return grad * 1.0, None


class Smooth(nn.Module):
    def forward(self, x):
        return SmoothFn.apply(x, 0.06 if here() and progress.step >= job_step(6) else 0.0)


if __name__ == "__main__":
    start()
    net = ResNet()
    net.blocks[1].extra = Smooth()
    model = DDP(net)
    fit(model, torch.optim.SGD(model.parameters(), lr=0.05), pictures, steps=25)
    finish()
