"""GRU classifier whose token buffer is recycled before the backward has used it."""

import torch
import torch.nn.functional as F
from common import Recurrent, chosen, finish, phrases, progress, say, start
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    rank, _ = start()
    model = DDP(Recurrent())
    adam = torch.optim.Adam(model.parameters())
    for progress.step in range(6):
        ids, labels = phrases(rank, progress.step)
        loss = F.cross_entropy(model(ids), labels)
        if chosen():
            ids.zero_()
        adam.zero_grad()
        loss.backward()
        adam.step()
        say(progress.step, loss)
    finish()


if __name__ == "__main__":
    main()
