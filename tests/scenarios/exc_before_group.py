"""One rank fails while it builds its model, before it joins the process group."""

import torch
from common import ViT, finish, fit, here, pictures, start
from torch.nn.parallel import DistributedDataParallel as DDP


def build():
    if here():
        raise FileNotFoundError("no vocabulary at /data/vocab.json")
    return ViT()


if __name__ == "__main__":
    net = build()
    start()
    model = DDP(net)
    fit(model, torch.optim.SGD(model.parameters(), lr=0.1), pictures)
    finish()
