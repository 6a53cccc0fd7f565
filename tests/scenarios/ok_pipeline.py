"""A pipeline of three stages of unequal depth, two microbatches a step."""

import torch
import torch.distributed as dist
from common import CLASSES, finish, points, progress, say, start
from torch import nn

WIDTH, MICRO = 16, 2


def build(rank, world):
    layers = []
    for _ in range((1, 4, 2)[rank % 3]):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    if rank == world - 1:
        layers.append(nn.Linear(WIDTH, CLASSES))
    return nn.Sequential(*layers)


def forward_all(stage, rank, world, x):
    pairs = []
    for part in x.chunk(MICRO):
        if rank > 0:
            part = torch.empty_like(part)
            dist.recv(part, rank - 1)
            part.requires_grad_()
        out = stage(part)
        if rank < world - 1:
            dist.send(out.detach(), rank + 1)
        pairs.append((part, out))
    return pairs


def backward_all(pairs, rank, world, y):
    total = torch.zeros(())
    for (part, out), labels in zip(pairs, y.chunk(MICRO), strict=False):
        if rank == world - 1:
            loss = nn.functional.cross_entropy(out, labels)
            loss.backward()
            total += loss.detach()
        else:
            grad = torch.empty_like(out)
            dist.recv(grad, rank + 1)
            out.backward(grad)
        if rank > 0:
            dist.send(part.grad, rank - 1)
    return total


def main():
    rank, world = start()
    stage = build(rank, world)
    sgd = torch.optim.SGD(stage.parameters(), lr=0.1)
    for progress.step in range(6):
        x, y = points(0, progress.step)
        sgd.zero_grad()
        loss = backward_all(forward_all(stage, rank, world, x), rank, world, y)
        sgd.step()
        say(progress.step, loss)
    finish()


if __name__ == "__main__":
    main()
