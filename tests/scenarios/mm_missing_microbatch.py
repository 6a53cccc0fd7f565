"""A pipeline of two stages with four microbatches, each stage a rank."""

import torch
import torch.distributed as dist
from common import CLASSES, chosen, finish, points, progress, say, start
from torch import nn

WIDTH, MICRO = 16, 4


def first_stage(stage, x):
    outputs = []
    for part in x.chunk(MICRO)[: MICRO - 1 if chosen(default=0) else MICRO]:
        outputs.append(stage(part))
        dist.send(outputs[-1].detach(), 1)
    for output in outputs:
        grad = torch.empty_like(output)
        dist.recv(grad, 1)
        output.backward(grad)


def second_stage(stage, y):
    losses, inputs = [], []
    for part in y.chunk(MICRO):
        x = torch.empty(len(part), WIDTH)
        dist.recv(x, 0)
        inputs.append(x.requires_grad_())
        losses.append(nn.functional.cross_entropy(stage(x), part))
    for x, loss in zip(inputs, losses, strict=False):
        loss.backward()
        dist.send(x.grad, 0)
    return sum(losses)


def main():
    rank, _ = start()
    stage = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH if rank == 0 else CLASSES))
    sgd = torch.optim.SGD(stage.parameters(), lr=0.1)
    for progress.step in range(6):
        x, y = points(0, progress.step, count=8)
        sgd.zero_grad()
        loss = first_stage(stage, x) if rank == 0 else second_stage(stage, y)
        sgd.step()
        say(progress.step, torch.zeros(()) if loss is None else loss)
    finish()


if __name__ == "__main__":
    main()
