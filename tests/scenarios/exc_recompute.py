"""Encoder with activation checkpointing; a module keeps state that its recomputation trips over."""

import torch
from common import Encoder, EncoderLayer, chosen, finish, fit, phrases, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint


class Lookahead(nn.Module):
    """Uses up one entry of a queue a call."""

    def __init__(self):
        super().__init__()
        self.queue = []

    def forward(self, x):
        if not self.queue:
            self.queue = [1.0, 1.0]
        if chosen() and len(self.queue) == 1:
            self.queue.clear()
        return x * self.queue.pop()


class Checkpointed(EncoderLayer):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


if __name__ == "__main__":
    start()
    net = Encoder()
    net.stack[1] = Checkpointed(16)
    net.stack[1].extra = Lookahead()
    model = DDP(net)
    fit(model, torch.optim.SGD(model.parameters(), lr=0.1), phrases)
    finish()
