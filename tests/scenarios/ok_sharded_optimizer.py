"""Nothing wrong: DDP with the optimizer's state sharded over the ranks."""

import torch
from common import Encoder, finish, fit, phrases, start
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

if __name__ == "__main__":
    start()
    model = DDP(Encoder(depth=2))
    fit(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01), phrases)
    finish()
