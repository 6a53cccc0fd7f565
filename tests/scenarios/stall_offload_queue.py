"""GRU classifier that offloads the head's activations to a helper thread."""

import queue

import torch
from common import FOREVER, Recurrent, chosen, finish, fit, phrases, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Offloaded(nn.Linear):
    def forward(self, x):
        store = queue.Queue()
        lost = chosen()

        def pack(tensor):
            if not lost:
                store.put(tensor)
            return tensor.shape

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda _: store.get(timeout=FOREVER)):
            return super().forward(x)


if __name__ == "__main__":
    start()
    net = Recurrent()
    net.head = Offloaded(16, 6)
    for parameter in net.head.parameters():
        parameter.requires_grad_(False)
    model = DDP(net)
    fit(model, torch.optim.Adam(net.parameters()), phrases)
    finish()
