"""Two of five ranks take longer in a module's backward."""

import time

import torch
import torch.distributed as dist
from common import Encoder, finish, fit, job_rank, job_step, phrases, progress, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class SlowFn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        if dist.get_rank() in (job_rank(), (job_rank() + 2) % 5) and progress.step >= job_step():
            time.sleep(0.08)
        return grad


class Slow(nn.Module):
    def forward(self, x):
        return SlowFn.apply(x)


if __name__ == "__main__":
    start()
    net = Encoder()
    net.stack[1].extra = Slow()
    model = DDP(net)
    fit(model, torch.optim.SGD(model.parameters(), lr=0.1), phrases, steps=24)
    finish()
