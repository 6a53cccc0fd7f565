"""ResNet with a tensor hook that waits for a plotting thread."""

import threading

import torch
from common import FOREVER, ResNet, chosen, finish, fit, pictures, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Plotted(nn.Module):
    def __init__(self):
        super().__init__()
        self.by = nn.Parameter(torch.ones(1))

    def forward(self, x):
        y = x * self.by
        drawn = threading.Event()
        if not chosen():
            drawn.set()
        y.register_hook(lambda grad: drawn.wait(FOREVER) and None)
        return y


if __name__ == "__main__":
    start()
    net = ResNet()
    net.blocks[1].extra = Plotted()
    model = DDP(net)
    fit(model, torch.optim.SGD(model.parameters(), lr=0.05), pictures)
    finish()
