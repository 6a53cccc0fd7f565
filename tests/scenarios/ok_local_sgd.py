"""Local SGD: gradients are averaged for four steps, then weights every third step."""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Recurrent, finish, phrases, progress, say, start
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    rank, world = start()
    model = DDP(Recurrent())
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for progress.step in range(14):
        ids, labels = phrases(rank, progress.step)
        sgd.zero_grad()
        with model.no_sync() if progress.step >= 4 else contextlib.nullcontext():
            loss = F.cross_entropy(model(ids), labels)
            loss.backward()
        sgd.step()
        if progress.step >= 4 and progress.step % 3 == 0:
            with torch.no_grad():
                for parameter in model.parameters():
                    dist.all_reduce(parameter)
                    parameter /= world
        say(progress.step, loss)
    finish()


if __name__ == "__main__":
    main()
