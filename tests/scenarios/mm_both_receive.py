"""Two ranks exchange an embedding after each step: the first sends first, the second receives first."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Recurrent, chosen, finish, phrases, progress, say, start, sync_gradients


def exchange(rank, mine):
    theirs = torch.empty_like(mine)
    if rank == 0 and not chosen(default=0):
        dist.send(mine, 1)
        dist.recv(theirs, 1)
    else:
        dist.recv(theirs, 1 - rank)
        dist.send(mine, 1 - rank)
    return theirs


def main():
    rank, _ = start()
    model = Recurrent()
    adam = torch.optim.Adam(model.parameters())
    for progress.step in range(6):
        ids, labels = phrases(rank, progress.step)
        loss = F.cross_entropy(model(ids), labels)
        adam.zero_grad()
        loss.backward()
        sync_gradients(model)
        exchange(rank, model.embed.weight.grad)
        adam.step()
        say(progress.step, loss)
    finish()


if __name__ == "__main__":
    main()
