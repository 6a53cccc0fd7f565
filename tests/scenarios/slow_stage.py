"""A pipeline of two stages, one of which gets slower in backward from a step on."""

import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import finish, here, job_step, points, progress, start
from torch import nn


class SlowFn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        if here() and progress.step >= job_step():
            time.sleep(0.06)
        return grad


class Slow(nn.Module):
    def forward(self, x):
        return SlowFn.apply(x)


def main():
    rank, _ = start()
    width = 16
    stage = nn.Sequential(nn.Linear(16, width), Slow(), nn.Linear(width, 16 if rank == 0 else 6))
    sgd = torch.optim.SGD(stage.parameters(), lr=0.1)
    for progress.step in range(24):
        sgd.zero_grad()
        for micro in range(2):
            x, y = points(0, 2 * progress.step + micro)
            if rank == 0:
                out = stage(x)
                dist.send(out.detach(), 1)
                grad = torch.empty_like(out)
                dist.recv(grad, 1)
                out.backward(grad)
            else:
                dist.recv(x, 0)
                x.requires_grad_()
                F.cross_entropy(stage(x), y).backward()
                dist.send(x.grad, 0)
        sgd.step()
    finish()


if __name__ == "__main__":
    main()
