"""ResNet with an optimizer that swaps its state in and out on one rank."""

import time

import torch
from common import ResNet, finish, fit, here, job_step, pictures, progress, start
from torch.nn.parallel import DistributedDataParallel as DDP


class SwappedSGD(torch.optim.SGD):
    def step(self, closure=None):
        if here() and progress.step >= job_step(6):
            time.sleep(0.06)
        return super().step(closure)


if __name__ == "__main__":
    start()
    model = DDP(ResNet())
    fit(model, SwappedSGD(model.parameters(), lr=0.05, momentum=0.9), pictures, steps=25)
    finish()
