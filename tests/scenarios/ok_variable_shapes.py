"""LSTM classifier on phrases of unequal number and length."""

import torch
from common import Recurrent, finish, fit, phrases, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def uneven(rank, step):
    return phrases(rank, step, count=2 + (rank + step) % 4, length=4 + 3 * ((rank * step) % 3))


if __name__ == "__main__":
    start()
    model = DDP(Recurrent(cell=nn.LSTM))
    fit(model, torch.optim.Adam(model.parameters()), uneven, steps=8)
    finish()
