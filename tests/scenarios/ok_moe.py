"""MoE with learned routing: every rank reduces every gradient, zeros where an expert was idle."""

import torch
import torch.nn.functional as F
from common import MoE, finish, points, progress, say, start, sync_gradients


def main():
    rank, _ = start()
    model = MoE(experts=4)
    adam = torch.optim.Adam(model.parameters())
    for progress.step in range(8):
        x, y = points(rank, progress.step, count=5)
        loss = F.cross_entropy(model(x), y)
        adam.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        sync_gradients(model)
        adam.step()
        say(progress.step, loss)
    finish()


if __name__ == "__main__":
    main()
