"""ResNet; a local probe of a hard example may fail, which is caught and counted."""

import copy

import torch
import torch.nn.functional as F
from common import ResNet, chosen, finish, pictures, progress, say, start
from torch.nn.parallel import DistributedDataParallel as DDP


def probe(model, x):
    """Sharpness of a copy of the model, on this rank alone."""
    copied = copy.deepcopy(model)
    out = copied(x[:, :2] if chosen() else x)
    out.square().mean().backward()
    return float(copied.head.weight.grad.norm())


def main():
    rank, _ = start()
    net = ResNet(depth=2)
    model = DDP(net)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    failed = 0
    for progress.step in range(6):
        x, y = pictures(rank, progress.step)
        try:
            probe(net, x)
        except RuntimeError:
            failed += 1
        loss = F.cross_entropy(model(x), y)
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        say(progress.step, loss)
    finish()
    print(f"rank {rank}: {failed} failed probes")


if __name__ == "__main__":
    main()
