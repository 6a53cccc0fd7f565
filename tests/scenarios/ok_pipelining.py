"""Three stages of torch.distributed.pipelining under its 1F1B schedule."""

import torch
import torch.nn.functional as F
from common import CLASSES, finish, points, progress, start
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B


def main():
    rank, world = start()
    last = rank == world - 1
    module = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, CLASSES if last else 16))
    stage = PipelineStage(module, rank, world, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=F.cross_entropy)
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    for progress.step in range(12):
        x, y = points(0, progress.step, count=8)
        sgd.zero_grad()
        if rank == 0:
            schedule.step(x)
        elif last:
            schedule.step(target=y)
        else:
            schedule.step()
        sgd.step()
    finish()


if __name__ == "__main__":
    main()
