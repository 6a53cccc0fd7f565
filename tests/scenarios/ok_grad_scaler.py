"""Mixed precision with a loss scale that begins too high: gradients overflow, and those steps are skipped."""

import torch
import torch.nn.functional as F
from common import ViT, finish, pictures, progress, say, start
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    rank, _ = start()
    model = DDP(ViT())
    sgd = torch.optim.SGD(model.parameters(), lr=0.001)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=100, backoff_factor=2.0**-20)
    for progress.step in range(10):
        x, y = pictures(rank, progress.step)
        sgd.zero_grad()
        loss = F.cross_entropy(model(x), y)
        scaler.scale(50 * loss).backward()
        scaler.step(sgd)
        scaler.update()
        say(progress.step, loss)
    finish()


if __name__ == "__main__":
    main()
