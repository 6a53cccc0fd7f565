"""ViT with a module that takes a logarithm."""

import torch
from common import ViT, chosen, finish, fit, pictures, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class LogScale(nn.Module):
    def forward(self, x):
        shift = -1.0 if chosen() else 1.0
        return x * torch.log(x.square().mean() + shift * 1e3)


if __name__ == "__main__":
    start()
    net = ViT()
    net.layers[1].extra = LogScale()
    model = DDP(net)
    fit(model, torch.optim.SGD(model.parameters(), lr=0.01), pictures)
    finish()
