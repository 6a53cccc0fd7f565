"""ResNet with an optimizer that asserts in native code."""

import os

import torch
from common import ResNet, chosen, finish, fit, pictures, start
from torch.nn.parallel import DistributedDataParallel as DDP


class StrictSGD(torch.optim.SGD):
    def step(self, closure=None):
        if chosen():
            os.abort()
        return super().step(closure)


if __name__ == "__main__":
    start()
    model = DDP(ResNet())
    fit(model, StrictSGD(model.parameters(), lr=0.05), pictures)
    finish()
