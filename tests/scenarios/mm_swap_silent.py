"""GRU classifier that sums two metrics, in the order of a dictionary."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Recurrent, chosen, finish, phrases, progress, say, start
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    rank, _ = start()
    model = DDP(Recurrent())
    adam = torch.optim.Adam(model.parameters())
    for progress.step in range(6):
        ids, labels = phrases(rank, progress.step)
        logits = model(ids)
        loss = F.cross_entropy(logits, labels)
        adam.zero_grad()
        loss.backward()
        adam.step()
        if chosen():
            sum_hits(logits, labels)
            sum_loss(loss)
        else:
            sum_loss(loss)
            sum_hits(logits, labels)
        say(progress.step, loss)
    finish()


def sum_loss(loss):
    dist.all_reduce(loss.detach().clone())


def sum_hits(logits, labels):
    dist.all_reduce((logits.argmax(-1) == labels).float().mean())


if __name__ == "__main__":
    main()
