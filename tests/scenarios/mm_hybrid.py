"""Six ranks: three stages in two replicas; gradients are averaged between the replicas where a flag says so."""

import torch
import torch.distributed as dist
from common import chosen, finish, points, progress, say, start
from torch import nn

STAGES, WIDTH = 3, 16


class Stage(nn.Module):
    """One stage of a pipeline: takes from the left, hands to the right, and back."""

    def __init__(self, rank, depth):
        super().__init__()
        self.rank, self.index = rank, rank % STAGES
        self.inner = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(depth)))

    def train_on(self, x):
        if self.index:
            dist.recv(x, self.rank - 1)
            x.requires_grad_()
        out = self.inner(x)
        if self.index < STAGES - 1:
            dist.send(out.detach(), self.rank + 1)
            grad = torch.empty_like(out)
            dist.recv(grad, self.rank + 1)
        else:
            grad = out.detach() / out.numel()
        out.backward(grad)
        if self.index:
            dist.send(x.grad, self.rank - 1)
        return out.detach().square().mean()


def average(parameters, group):
    for parameter in parameters:
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM, group=group)
        parameter.grad /= 2


def main():
    rank, _ = start()
    pairs = [dist.new_group([index, index + STAGES]) for index in range(STAGES)]
    stage = Stage(rank, depth=(2, 1, 3)[rank % STAGES])
    sgd = torch.optim.SGD(stage.parameters(), lr=0.1)
    for progress.step in range(6):
        loss = stage.train_on(points(rank // STAGES, progress.step)[0])
        if not chosen():
            average(stage.parameters(), pairs[rank % STAGES])
        sgd.step()
        sgd.zero_grad()
        say(progress.step, loss)
    finish()


if __name__ == "__main__":
    main()
