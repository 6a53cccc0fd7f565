"""Tensor parallel blocks (DTensor); an activation's backward hangs on one rank."""

import time

import torch
from common import FOREVER, chosen, finish, progress, start
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class SquashFn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        return x.relu()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.seconds)
        return grad, None


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        slow = self.watched and chosen()
        return x + self.down(SquashFn.apply(self.up(x), FOREVER if slow else 0))


def main():
    _, world = start()
    mesh = init_device_mesh("cpu", (world,))
    net = nn.Sequential(Mlp(), Mlp(), Mlp())
    for number, block in enumerate(net):
        block.watched = number == 1
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    sgd = torch.optim.SGD(net.parameters(), lr=0.01)
    for progress.step in range(6):
        net(torch.randn(4, 16)).pow(2).mean().backward()
        sgd.step()
        sgd.zero_grad()
    finish()


if __name__ == "__main__":
    main()
