"""Four ranks in a 2x2 grid: metrics are summed over rows, then over columns."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import MoE, chosen, finish, points, progress, say, start
from torch.nn.parallel import DistributedDataParallel as DDP


def grid(rank):
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return rows[rank // 2], columns[rank % 2]


def main():
    rank, _ = start()
    groups = grid(rank)
    model = DDP(MoE(), find_unused_parameters=True)
    adam = torch.optim.Adam(model.parameters())
    for progress.step in range(6):
        x, y = points(rank, progress.step)
        loss = F.cross_entropy(model(x), y)
        adam.zero_grad()
        loss.backward()
        total = loss.detach().clone()
        for group in reversed(groups) if chosen() else groups:
            dist.all_reduce(total, group=group)
        adam.step()
        say(progress.step, total)
    finish()


if __name__ == "__main__":
    main()
