"""MoE; one rank believes that the common part is over, leaves the group and fine-tunes alone."""

import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import MoE, chosen, finish, points, progress, say, start, sync_gradients


def main():
    rank, _ = start()
    model = MoE()
    model.route = lambda weights: torch.arange(len(weights)) % 3
    adam = torch.optim.Adam(model.parameters())
    together = True
    for progress.step in range(150):
        x, y = points(rank, progress.step)
        loss = F.cross_entropy(model(x), y)
        adam.zero_grad()
        loss.backward()
        if together:
            sync_gradients(model)
        else:
            time.sleep(0.1)
        adam.step()
        say(progress.step, loss)
        if chosen():
            dist.destroy_process_group()
            together = False
    if together:
        finish()


if __name__ == "__main__":
    main()
