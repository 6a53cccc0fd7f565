"""Six ranks: two pipelines of three stages, each stage averages its gradients with its twin."""

import torch
import torch.distributed as dist
from common import finish, points, progress, say, start
from torch import nn

STAGES, WIDTH = 3, 16


def run_stage(stage, rank, index, x):
    """Forward and backward of one batch through the pipeline."""
    if index > 0:
        x = torch.empty_like(x)
        dist.recv(x, rank - 1)
        x.requires_grad_()
    out = stage(x)
    if index < STAGES - 1:
        dist.send(out.detach(), rank + 1)
        grad = torch.empty_like(out)
        dist.recv(grad, rank + 1)
        out.backward(grad)
        loss = torch.zeros(())
    else:
        loss = out.square().mean()
        loss.backward()
    if index > 0:
        dist.send(x.grad, rank - 1)
    return loss


def main():
    rank, world = start()
    index = rank % STAGES
    twins = [dist.new_group(list(range(first, world, STAGES))) for first in range(STAGES)][index]
    layers = [layer for _ in range(1 + index) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    stage = nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))
    sgd = torch.optim.SGD(stage.parameters(), lr=0.1)
    for progress.step in range(6):
        sgd.zero_grad()
        loss = run_stage(stage, rank, index, points(rank // STAGES, progress.step)[0])
        for parameter in stage.parameters():
            dist.all_reduce(parameter.grad, group=twins)
            parameter.grad /= world // STAGES
        sgd.step()
        say(progress.step, loss)
    finish()


if __name__ == "__main__":
    main()
