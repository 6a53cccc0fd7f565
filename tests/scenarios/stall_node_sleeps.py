"""Encoder with a custom Function that waits in its backward."""

import time

import torch
from common import FOREVER, Encoder, chosen, finish, fit, phrases, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class DrainFn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.seconds)
        return grad * 1.0, None


class Drain(nn.Module):
    def forward(self, x):
        return DrainFn.apply(x, FOREVER if chosen() else 0)


if __name__ == "__main__":
    start()
    net = Encoder()
    net.stack[0].extra = Drain()
    model = DDP(net)
    fit(model, torch.optim.SGD(model.parameters(), lr=0.1), phrases)
    finish()
