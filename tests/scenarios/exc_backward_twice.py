"""LSTM classifier; a debugging leftover calls backward again."""

import torch
import torch.nn.functional as F
from common import Recurrent, chosen, finish, phrases, progress, say, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    rank, _ = start()
    model = DDP(Recurrent(cell=nn.LSTM))
    adam = torch.optim.Adam(model.parameters())
    for progress.step in range(6):
        ids, labels = phrases(rank, progress.step)
        loss = F.cross_entropy(model(ids), labels)
        adam.zero_grad()
        loss.backward()
        if chosen():
            loss.backward()
        adam.step()
        say(progress.step, loss)
    finish()


if __name__ == "__main__":
    main()
