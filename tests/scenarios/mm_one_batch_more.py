"""GRU classifier; the files of one rank hold a batch more."""

import torch
import torch.nn.functional as F
from common import Recurrent, finish, here, job_step, phrases, progress, say, start
from torch.nn.parallel import DistributedDataParallel as DDP


def shard(rank):
    return [phrases(rank, step) for step in range(job_step(3) + (1 if here() else 0))]


def main():
    rank, _ = start()
    model = DDP(Recurrent())
    adam = torch.optim.Adam(model.parameters())
    for progress.step, (ids, labels) in enumerate(shard(rank)):
        loss = F.cross_entropy(model(ids), labels)
        adam.zero_grad()
        loss.backward()
        adam.step()
        say(progress.step, loss)
    finish()


if __name__ == "__main__":
    main()
