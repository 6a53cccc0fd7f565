"""MoE; one rank gathers metrics for a report."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import MoE, chosen, finish, points, progress, say, start
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    rank, world = start()
    model = DDP(MoE(), find_unused_parameters=True)
    adam = torch.optim.Adam(model.parameters())
    for progress.step in range(6):
        x, y = points(rank, progress.step)
        loss = F.cross_entropy(model(x), y)
        adam.zero_grad()
        loss.backward()
        adam.step()
        say(progress.step, loss)
        if chosen():
            everyone = [None] * world
            dist.gather_object({"loss": float(loss)}, everyone, dst=rank)
    finish()


if __name__ == "__main__":
    main()
