"""Encoder with a module that leaves the process at once."""

import os

import torch
from common import Encoder, chosen, finish, fit, phrases, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Licensed(nn.Module):
    def forward(self, x):
        if chosen():
            os._exit(1)
        return x + 1.0


if __name__ == "__main__":
    start()
    net = Encoder()
    net.stack[2].extra = Licensed()
    model = DDP(net)
    fit(model, torch.optim.AdamW(model.parameters()), phrases)
    finish()
