"""A pipeline run by torch's own schedule; one stage's backward does not return."""

import time

import torch
from common import FOREVER, chosen, finish, progress, start
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe


class HoldFn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.seconds)
        return grad, None


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(12, 12)
        self.seconds = 0

    def forward(self, x):
        return HoldFn.apply(torch.tanh(self.mix(x)), self.seconds)


def main():
    rank, world = start()
    part = Part()
    stage = PipelineStage(part, rank, world, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 4, loss_fn=lambda out, goal: (out - goal).pow(2).mean())
    sgd = torch.optim.SGD(part.parameters(), lr=0.01)
    for progress.step in range(6):
        part.seconds = FOREVER if chosen() else 0
        x, goal = torch.randn(8, 12), torch.randn(8, 12)
        if rank == 0:
            schedule.step(x)
        elif rank == world - 1:
            schedule.step(target=goal)
        else:
            schedule.step()
        sgd.step()
        sgd.zero_grad()
    finish()


if __name__ == "__main__":
    main()
