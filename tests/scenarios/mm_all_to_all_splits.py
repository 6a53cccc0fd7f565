"""Tokens travel to the ranks that hold their experts, in equal shares."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import MoE, chosen, finish, points, progress, say, start
from torch.nn.parallel import DistributedDataParallel as DDP


def dispatch(rank, world, x):
    share = [len(x) // world] * world
    if chosen():
        share[0], share[-1] = share[0] + 1, share[-1] - 1
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, output_split_sizes=[len(x) // world] * world, input_split_sizes=share)
    return received


def main():
    rank, world = start()
    model = DDP(MoE(), find_unused_parameters=True)
    adam = torch.optim.Adam(model.parameters())
    for progress.step in range(6):
        x, y = points(rank, progress.step, count=4 * world)
        loss = F.cross_entropy(model(dispatch(rank, world, x)), y)
        adam.zero_grad()
        loss.backward()
        adam.step()
        say(progress.step, loss)
    finish()


if __name__ == "__main__":
    main()
