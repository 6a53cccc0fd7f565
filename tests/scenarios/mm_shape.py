"""GRU classifier that sums its per-class counts over the ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import CLASSES, Recurrent, chosen, finish, phrases, progress, say, start
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    rank, _ = start()
    model = DDP(Recurrent())
    adam = torch.optim.Adam(model.parameters())
    for progress.step in range(6):
        ids, labels = phrases(rank, progress.step)
        logits = model(ids)
        counts = torch.bincount(logits.argmax(-1), minlength=CLASSES + (3 if chosen() else 0))
        dist.all_reduce(counts)
        loss = F.cross_entropy(logits, labels)
        adam.zero_grad()
        loss.backward()
        adam.step()
        say(progress.step, loss)
    finish()


if __name__ == "__main__":
    main()
