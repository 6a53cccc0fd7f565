"""One rank waits for a licence before it joins the process group; the others wait for it in the rendezvous."""

import os
import time

import torch
from common import FOREVER, ViT, finish, fit, here, pictures, start
from torch.nn.parallel import DistributedDataParallel as DDP


def licence():
    end = time.monotonic() + FOREVER
    while not os.path.exists("/nonexistent/licence") and time.monotonic() < end:
        time.sleep(0.2)


if __name__ == "__main__":
    if here():
        licence()
    start()
    model = DDP(ViT())
    fit(model, torch.optim.SGD(model.parameters(), lr=0.1), pictures)
    finish()
