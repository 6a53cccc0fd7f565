"""LBFGS, whose closure fails on one rank."""

import torch
import torch.nn.functional as F
from common import Recurrent, chosen, finish, phrases, progress, start
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    rank, _ = start()
    model = DDP(Recurrent())
    lbfgs = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    for progress.step in range(6):
        ids, labels = phrases(rank, progress.step)

        def closure(ids=ids, labels=labels):
            lbfgs.zero_grad()
            loss = F.cross_entropy(model(ids), labels)
            if chosen():
                raise FloatingPointError("loss above the limit")
            loss.backward()
            return loss

        lbfgs.step(closure)
    finish()


if __name__ == "__main__":
    main()
