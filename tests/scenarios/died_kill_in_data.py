"""Trains from a dataset that reads in the rank's own process."""

import os
import signal

import torch
import torch.nn.functional as F
from common import CLASSES, ViT, finish, here, job_step, say, start
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset


class Scans(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        if here() and index == 4 * job_step() + 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((3, 12, 12), index / 24), index % CLASSES


def main():
    start()
    model = DDP(ViT(depth=1))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, (images, labels) in enumerate(DataLoader(Scans(), batch_size=4)):
        sgd.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        sgd.step()
        say(number, loss)
    finish()


if __name__ == "__main__":
    main()
