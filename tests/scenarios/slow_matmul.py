"""One rank multiplies larger matrices than its peers in a layer, backward too."""

import torch
from common import ViT, finish, fit, here, job_step, pictures, progress, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Mix(nn.Module):
    def forward(self, x):
        inner = 20000 if here() and progress.step >= job_step() else 16
        return x + (x @ torch.zeros(x.shape[-1], inner)) @ torch.zeros(inner, x.shape[-1]) if inner else x


if __name__ == "__main__":
    start()
    net = ViT(width=96)
    net.layers[1].extra = Mix()
    model = DDP(net)
    fit(model, torch.optim.SGD(model.parameters(), lr=0.1), pictures, steps=24)
    finish()
