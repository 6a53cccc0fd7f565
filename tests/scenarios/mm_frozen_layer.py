"""A ViT one of whose ranks has frozen a layer before wrapping it."""

import torch
from common import ViT, finish, fit, here, pictures, start
from torch.nn.parallel import DistributedDataParallel as DDP

if __name__ == "__main__":
    start()
    net = ViT()
    if here():
        net.layers[1].requires_grad_(False)
    model = DDP(net)
    fit(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1), pictures)
    finish()
