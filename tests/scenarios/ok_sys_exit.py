"""GRU classifier whose script ends with sys.exit(0)."""

import sys

import torch
from common import Recurrent, finish, fit, phrases, start
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    start()
    model = DDP(Recurrent())
    fit(model, torch.optim.Adam(model.parameters()), phrases)
    finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
