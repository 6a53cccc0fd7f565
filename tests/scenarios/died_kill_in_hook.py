"""ViT with a tensor hook that keeps gradients for a plot, and the memory killer comes by."""

import os
import signal

import torch
from common import ViT, chosen, finish, fit, pictures, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Observed(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        y = nn.functional.gelu(x)
        doomed = chosen()

        def keep(grad):
            self.seen.append(float(grad.norm()))
            if doomed:
                os.kill(os.getpid(), signal.SIGKILL)

        y.register_hook(keep)
        return y


if __name__ == "__main__":
    start()
    net = ViT()
    net.layers[0].extra = Observed()
    model = DDP(net)
    fit(model, torch.optim.SGD(model.parameters(), lr=0.1), pictures)
    finish()
