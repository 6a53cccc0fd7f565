"""Encoder trained within a time budget that every rank measures for itself."""

import time

import torch
import torch.nn.functional as F
from common import Encoder, chosen, finish, phrases, progress, say, start
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    rank, _ = start()
    model = DDP(Encoder(depth=2))
    adam = torch.optim.AdamW(model.parameters())
    began = time.monotonic()
    for progress.step in range(7):
        clock_skew = 3600 if chosen() else 0
        if time.monotonic() - began + clock_skew > 600:
            break
        ids, labels = phrases(rank, progress.step)
        loss = F.cross_entropy(model(ids), labels)
        adam.zero_grad()
        loss.backward()
        adam.step()
        say(progress.step, loss)
    finish()


if __name__ == "__main__":
    main()
