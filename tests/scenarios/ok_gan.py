"""A GAN: two models, two optimizers, two backwards a step."""

import torch
import torch.nn.functional as F
from common import finish, points, progress, say, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    rank, _ = start()
    generator = DDP(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16)))
    critic = DDP(nn.Sequential(nn.Linear(16, 16), nn.LeakyReLU(), nn.Linear(16, 1)))
    makes, judges = torch.optim.Adam(generator.parameters()), torch.optim.Adam(critic.parameters())
    torch.manual_seed(rank)
    for progress.step in range(6):
        real = points(rank, progress.step)[0]
        fake = generator(torch.randn(8, 4))
        judges.zero_grad()
        scores = critic(torch.cat([real, fake.detach()]))
        truth = torch.cat([torch.ones(8, 1), torch.zeros(8, 1)])
        loss = F.binary_cross_entropy_with_logits(scores, truth)
        loss.backward()
        judges.step()
        makes.zero_grad()
        F.binary_cross_entropy_with_logits(critic(fake), torch.ones(8, 1)).backward()
        makes.step()
        say(progress.step, loss)
    finish()


if __name__ == "__main__":
    main()
