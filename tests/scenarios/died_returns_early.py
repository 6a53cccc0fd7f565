"""A loop that returns when it believes to be done."""

import torch
import torch.nn.functional as F
from common import MoE, chosen, finish, points, progress, say, start, sync_gradients


def main():
    rank, _ = start()
    model = MoE()
    model.route = lambda weights: torch.arange(len(weights)) % 3
    adam = torch.optim.Adam(model.parameters())
    for progress.step in range(6):
        x, y = points(rank, progress.step)
        loss = F.cross_entropy(model(x), y)
        adam.zero_grad()
        loss.backward()
        sync_gradients(model)
        adam.step()
        say(progress.step, loss)
        if chosen():
            print("converged")
            return
    finish()


if __name__ == "__main__":
    main()
