"""A loop in which rank 0 asks an operator before it goes on."""

import os
import time

import torch
import torch.nn.functional as F
from common import FOREVER, Recurrent, chosen, finish, phrases, progress, say, start
from torch.nn.parallel import DistributedDataParallel as DDP


def wait_for_approval(path):
    end = time.monotonic() + FOREVER
    while time.monotonic() < end and not os.path.exists(path):
        time.sleep(0.5)


def main():
    rank, _ = start()
    model = DDP(Recurrent())
    adam = torch.optim.Adam(model.parameters())
    for progress.step in range(6):
        if chosen(default=0):
            wait_for_approval("/nonexistent/approved")
        x, y = phrases(rank, progress.step)
        loss = F.cross_entropy(model(x), y)
        adam.zero_grad()
        loss.backward()
        adam.step()
        say(progress.step, loss)
    finish()


if __name__ == "__main__":
    main()
