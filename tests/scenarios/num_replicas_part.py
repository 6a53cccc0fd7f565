"""ViT with a weight clamp that one rank alone applies."""

import torch
import torch.nn.functional as F
from common import ViT, chosen, finish, pictures, progress, say, start
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    rank, _ = start()
    model = DDP(ViT())
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    for progress.step in range(10):
        x, y = pictures(rank, progress.step)
        loss = F.cross_entropy(model(x), y)
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        if chosen():
            with torch.no_grad():
                model.module.layers[1].feed[2].weight.clamp_(-0.01, 0.01)
        say(progress.step, loss)
    finish()


if __name__ == "__main__":
    main()
