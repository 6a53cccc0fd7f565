"""One rank gets SIGTERM from outside (a scheduler's, say) in the middle of a step."""

import os
import signal

import torch
from common import ViT, chosen, finish, fit, pictures, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Evicted(nn.Module):
    def forward(self, x):
        if chosen():
            os.kill(os.getpid(), signal.SIGTERM)
        return x


if __name__ == "__main__":
    start()
    net = ViT()
    net.layers[0].extra = Evicted()
    model = DDP(net)
    fit(model, torch.optim.SGD(model.parameters(), lr=0.1), pictures)
    finish()
