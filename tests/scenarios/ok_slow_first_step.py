"""Encoder that builds a cache in its first forward, longer on one rank."""

import time

import torch
from common import Encoder, finish, fit, here, phrases, progress, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Warm(nn.Module):
    def forward(self, x):
        if progress.step == 0:
            time.sleep(2.0 if here() else 0.5)
        return x


if __name__ == "__main__":
    start()
    net = Encoder()
    net.stack[1].extra = Warm()
    model = DDP(net)
    fit(model, torch.optim.SGD(model.parameters(), lr=0.1), phrases, steps=12)
    finish()
