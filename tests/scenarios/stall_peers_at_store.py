"""Ranks set a key in the store after each step and wait for those of the others; one rank sleeps before its own."""

import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import FOREVER, ViT, chosen, finish, pictures, progress, say, start
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    rank, world = start()
    store = dist.distributed_c10d._get_default_store()
    model = DDP(ViT())
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    for progress.step in range(6):
        x, y = pictures(rank, progress.step)
        sgd.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        sgd.step()
        if chosen():
            time.sleep(FOREVER)
        store.set(f"done/{progress.step}/{rank}", "1")
        store.wait([f"done/{progress.step}/{other}" for other in range(world)])
        say(progress.step, loss)
    finish()


if __name__ == "__main__":
    main()
