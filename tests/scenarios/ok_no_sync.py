"""Encoder with gradient accumulation over three batches, two of them in no_sync."""

import torch
import torch.nn.functional as F
from common import Encoder, finish, phrases, progress, say, start
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    rank, _ = start()
    model = DDP(Encoder(depth=2))
    adam = torch.optim.AdamW(model.parameters())
    for progress.step in range(6):
        adam.zero_grad()
        with model.no_sync():
            for part in range(2):
                ids, labels = phrases(rank, 10 * progress.step + part)
                (F.cross_entropy(model(ids), labels) / 3).backward()
        ids, labels = phrases(rank, 10 * progress.step + 2)
        loss = F.cross_entropy(model(ids), labels) / 3
        loss.backward()
        adam.step()
        say(progress.step, loss)
    finish()


if __name__ == "__main__":
    main()
