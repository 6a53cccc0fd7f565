"""MoE; one rank believes that the job is over, cleans up and writes a report."""

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
    for progress.step in range(6):
        x, y = points(rank, progress.step)
        loss = F.cross_entropy(model(x), y)
        adam.zero_grad()
        loss.backward()
        sync_gradients(model)
        adam.step()
        say(progress.step, loss)
        if chosen():
            dist.destroy_process_group()
            time.sleep(3)  # the report
            return
    finish()


if __name__ == "__main__":
    main()
