"""Encoder; rank 0 writes a checkpoint every second step, the others wait at a barrier."""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Encoder, finish, phrases, progress, say, start
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    rank, _ = start()
    model = DDP(Encoder(depth=2))
    adam = torch.optim.AdamW(model.parameters())
    with tempfile.TemporaryDirectory() as folder:
        for progress.step in range(6):
            ids, labels = phrases(rank, progress.step)
            loss = F.cross_entropy(model(ids), labels)
            adam.zero_grad()
            loss.backward()
            adam.step()
            say(progress.step, loss)
            if progress.step % 2:
                if rank == 0:
                    torch.save(model.module.state_dict(), Path(folder) / f"step{progress.step}.pt")
                dist.barrier()
    finish()


if __name__ == "__main__":
    main()
