"""ViT; somebody suspends one rank in a forward."""

import os
import signal

import torch
from common import ViT, chosen, finish, fit, pictures, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Suspended(nn.Module):
    def forward(self, x):
        if chosen():
            os.kill(os.getpid(), signal.SIGSTOP)
        return x * 1.0


if __name__ == "__main__":
    start()
    net = ViT()
    net.layers[1].extra = Suspended()
    model = DDP(net)
    fit(model, torch.optim.SGD(model.parameters(), lr=0.1), pictures)
    finish()
