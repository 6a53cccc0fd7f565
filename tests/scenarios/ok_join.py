"""GRU classifier on uneven data, with join()."""

import torch
import torch.nn.functional as F
from common import Recurrent, finish, here, phrases, progress, say, start
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    rank, _ = start()
    model = DDP(Recurrent())
    adam = torch.optim.Adam(model.parameters())
    with Join([model]):
        for progress.step in range(8 if here() else 5):
            ids, labels = phrases(rank, progress.step)
            adam.zero_grad()
            loss = F.cross_entropy(model(ids), labels)
            loss.backward()
            adam.step()
            say(progress.step, loss)
    finish()


if __name__ == "__main__":
    main()
