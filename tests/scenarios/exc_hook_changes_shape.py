"""ResNet with a tensor hook that is meant to mask channels of a gradient."""

import torch
from common import ResNet, chosen, finish, fit, pictures, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.by = nn.Parameter(torch.ones(1))

    def forward(self, x):
        y = x * self.by
        if chosen():
            y.register_hook(lambda grad: grad[:, ::2])
        return y


if __name__ == "__main__":
    start()
    net = ResNet()
    net.blocks[2].extra = Scale()
    model = DDP(net)
    fit(model, torch.optim.SGD(model.parameters(), lr=0.05), pictures)
    finish()
