"""One rank hangs in its data; the others meet at a monitored barrier that gives up on it."""

import datetime
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import FOREVER, ViT, chosen, finish, pictures, progress, say, start
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    rank, _ = start()
    model = DDP(ViT())
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    for progress.step in range(8):
        if chosen():
            time.sleep(FOREVER)
        x, y = pictures(rank, progress.step)
        dist.monitored_barrier(timeout=datetime.timedelta(seconds=4))
        sgd.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        sgd.step()
        say(progress.step, loss)
    finish()


if __name__ == "__main__":
    main()
