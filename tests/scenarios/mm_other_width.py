"""A model that one rank builds wider than the others, from a stale configuration."""

import torch
from common import Recurrent, finish, fit, here, phrases, start
from torch.nn.parallel import DistributedDataParallel as DDP

if __name__ == "__main__":
    start()
    model = DDP(Recurrent(width=20 if here() else 16))
    fit(model, torch.optim.SGD(model.parameters(), lr=0.1), phrases)
    finish()
