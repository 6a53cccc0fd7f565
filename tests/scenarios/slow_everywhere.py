"""One rank's machine is slow: every module takes longer there."""

import time

import torch
from common import ViT, finish, fit, here, job_step, pictures, progress, start
from torch.nn.parallel import DistributedDataParallel as DDP


def throttle(module, args):
    end = time.perf_counter() + (0.002 if here() and progress.step >= job_step() else 0.0)
    while time.perf_counter() < end:
        pass


if __name__ == "__main__":
    start()
    net = ViT()
    for module in net.modules():
        if not list(module.children()):
            module.register_forward_pre_hook(throttle)
    model = DDP(net)
    fit(model, torch.optim.SGD(model.parameters(), lr=0.1), pictures, steps=25)
    finish()
