"""GRU classifier with a loss weight that one rank gets wrong."""

import torch
import torch.nn.functional as F
from common import Recurrent, chosen, finish, phrases, progress, say, start
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    rank, _ = start()
    model = DDP(Recurrent())
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    for progress.step in range(6):
        ids, labels = phrases(rank, progress.step)
        weight = 1e8 if chosen() else 1.0
        loss = weight * F.cross_entropy(model(ids), labels)
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        say(progress.step, loss)
    finish()


if __name__ == "__main__":
    main()
