"""MoE whose settings come from rank 0, as a list of objects, before each step."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import MoE, finish, points, progress, say, start
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    rank, _ = start()
    model = DDP(MoE(), find_unused_parameters=True)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for progress.step in range(6):
        settings = [{"lr": 0.1 / (1 + progress.step)}, "x" * progress.step] if rank == 0 else [None, None]
        dist.broadcast_object_list(settings, src=0)
        sgd.param_groups[0]["lr"] = settings[0]["lr"]
        x, y = points(rank, progress.step)
        loss = F.cross_entropy(model(x), y)
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        say(progress.step, loss)
    finish()


if __name__ == "__main__":
    main()
