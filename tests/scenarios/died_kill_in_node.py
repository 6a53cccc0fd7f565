"""GRU classifier with a custom Function that is killed in its backward."""

import os
import signal

import torch
from common import Recurrent, chosen, finish, fit, phrases, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class TapeFn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, doomed):
        ctx.doomed = doomed
        return 2.0 * x

    @staticmethod
    def backward(ctx, grad):
        if ctx.doomed:
            os.kill(os.getpid(), signal.SIGKILL)
        return 2.0 * grad, None


class Tape(nn.Module):
    def forward(self, x):
        return TapeFn.apply(x, chosen())


if __name__ == "__main__":
    start()
    net = Recurrent()
    net.extra = Tape()
    model = DDP(net)
    fit(model, torch.optim.Adam(model.parameters()), phrases)
    finish()
