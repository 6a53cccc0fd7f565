"""Ranks meet at a barrier after each step; one is killed while it waits there for a slower one."""

import os
import signal
import threading
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Recurrent, chosen, finish, here, job_rank, job_step, phrases, progress, say, start
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    rank, world = start()
    model = DDP(Recurrent())
    adam = torch.optim.Adam(model.parameters())
    for progress.step in range(6):
        x, y = phrases(rank, progress.step)
        loss = F.cross_entropy(model(x), y)
        adam.zero_grad()
        loss.backward()
        adam.step()
        say(progress.step, loss)
        if chosen():
            threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
        elif not here() and progress.step == job_step() and rank == (job_rank() + 1) % world:
            time.sleep(3)  # a peer with more to do
        dist.barrier()
    finish()


if __name__ == "__main__":
    main()
