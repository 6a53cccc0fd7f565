"""Critic with a gradient penalty: its loss differentiates a gradient."""

import torch
from common import chosen, finish, points, progress, say, start, sync_gradients
from torch import nn


class SlopeGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, grad, x):
        ctx.save_for_backward(x)
        return torch.where(x > 0, grad, 0.2 * grad)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        if chosen():
            raise ArithmeticError("no curvature at this point")
        return torch.where(x > 0, grad, 0.2 * grad), None


class Slope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.where(x > 0, x, 0.2 * x)

    @staticmethod
    def backward(ctx, grad):
        return SlopeGrad.apply(grad, *ctx.saved_tensors)


class LeakySlope(nn.Module):
    def forward(self, x):
        return Slope.apply(x)


def main():
    rank, _ = start()
    critic = nn.Sequential(nn.Linear(16, 24), LeakySlope(), nn.Linear(24, 1))
    adam = torch.optim.Adam(critic.parameters())
    for progress.step in range(6):
        x = points(rank, progress.step)[0].requires_grad_()
        score = critic(x).sum()
        (slope,) = torch.autograd.grad(score, x, create_graph=True)
        loss = ((slope.norm(dim=1) - 1) ** 2).mean() + 0 * score
        adam.zero_grad()
        loss.backward()
        sync_gradients(critic)
        adam.step()
        say(progress.step, loss)
    finish()


if __name__ == "__main__":
    main()
