"""ResNet with batch norm; one rank evaluates with the wrapped model, gradients enabled."""

import torch
import torch.nn.functional as F
from common import ResNet, chosen, finish, pictures, progress, say, start
from torch.nn.parallel import DistributedDataParallel as DDP


def evaluate(model):
    model.eval()
    for number in range(2):
        model(pictures(99, number)[0])
    model.train()


def main():
    rank, _ = start()
    model = DDP(ResNet(norm="batch"))
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    for progress.step in range(6):
        x, y = pictures(rank, progress.step)
        loss = F.cross_entropy(model(x), y)
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        say(progress.step, loss)
        if chosen():
            evaluate(model)
    finish()


if __name__ == "__main__":
    main()
