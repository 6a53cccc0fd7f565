"""ResNet with a native kernel in a backward that reads a null pointer."""

import ctypes

import torch
from common import ResNet, chosen, finish, fit, pictures, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class NativeFn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.broken = chosen()
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        address = 0 if ctx.broken else grad.data_ptr()
        ctypes.memmove(ctypes.create_string_buffer(4), address, 4)
        return grad


class Native(nn.Module):
    def forward(self, x):
        return NativeFn.apply(x)


if __name__ == "__main__":
    start()
    net = ResNet()
    net.blocks[0].extra = Native()
    model = DDP(net)
    fit(model, torch.optim.SGD(model.parameters(), lr=0.05), pictures)
    finish()
