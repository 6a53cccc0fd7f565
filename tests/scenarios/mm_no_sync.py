"""Encoder trained with a schedule of no_sync steps, which one rank reads differently."""

import contextlib

import torch
import torch.nn.functional as F
from common import Encoder, chosen, finish, phrases, progress, say, start
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    rank, _ = start()
    model = DDP(Encoder(depth=2))
    adam = torch.optim.AdamW(model.parameters())
    for progress.step in range(6):
        ids, labels = phrases(rank, progress.step)
        adam.zero_grad()
        with model.no_sync() if chosen() else contextlib.nullcontext():
            loss = F.cross_entropy(model(ids), labels)
            loss.backward()
        adam.step()
        say(progress.step, loss)
    finish()


if __name__ == "__main__":
    main()
