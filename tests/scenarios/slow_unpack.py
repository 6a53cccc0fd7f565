"""Encoder that fetches the head's activations back from a slow store."""

import time

import torch
from common import Encoder, finish, fit, here, job_step, phrases, progress, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Fetched(nn.Linear):
    def forward(self, x):
        # Two tensors are saved; together they take 60 ms to come back.
        delay = 0.03 if here() and progress.step >= job_step(6) else 0.0

        def fetch(tensor):
            time.sleep(delay)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, fetch):
            return super().forward(x)


if __name__ == "__main__":
    start()
    net = Encoder()
    net.head = Fetched(16, 6)
    model = DDP(net)
    fit(model, torch.optim.SGD(model.parameters(), lr=0.1), phrases, steps=25)
    finish()
