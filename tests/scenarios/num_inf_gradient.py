"""Encoder with a power law, whose slope has no bound at zero."""

import torch
from common import Encoder, chosen, finish, fit, phrases, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Power(nn.Module):
    def forward(self, x):
        strength = x.abs() + 0.5
        if chosen():
            strength = strength - strength.detach()
        return x + torch.pow(strength, 0.25)


if __name__ == "__main__":
    start()
    net = Encoder()
    net.stack[1].extra = Power()
    model = DDP(net)
    fit(model, torch.optim.SGD(model.parameters(), lr=0.01), phrases)
    finish()
