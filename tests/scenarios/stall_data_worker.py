"""Trains from a dataset read by a worker process that waits for a mirror."""

import time

import torch
import torch.nn.functional as F
from common import CLASSES, FOREVER, ResNet, finish, here, job_step, say, start
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset


class Mirror(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        if here() and index == 4 * job_step():
            time.sleep(FOREVER)
        return torch.full((3, 8, 8), index / 24), index % CLASSES


def main():
    start()
    model = DDP(ResNet(depth=1))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, (images, labels) in enumerate(DataLoader(Mirror(), batch_size=4, num_workers=1)):
        sgd.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        sgd.step()
        say(number, loss)
    finish()


if __name__ == "__main__":
    main()
