"""Trains from a cached dataset with a lock of its own."""

import threading

import torch
import torch.nn.functional as F
from common import CLASSES, FOREVER, ResNet, finish, here, job_step, say, start
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset


class Cache(Dataset):
    def __init__(self):
        self.lock = threading.Lock()
        self.items = {}

    def __len__(self):
        return 24

    def __getitem__(self, index):
        with self.lock:
            if index not in self.items:
                self.items[index] = torch.full((3, 8, 8), index / 24)
            if here() and index == 4 * job_step():
                self.evict()
            return self.items[index], index % CLASSES

    def evict(self):
        if self.lock.acquire(timeout=FOREVER):
            self.items.clear()


def main():
    start()
    model = DDP(ResNet(depth=1))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, (images, labels) in enumerate(DataLoader(Cache(), batch_size=4)):
        sgd.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        sgd.step()
        say(number, loss)
    finish()


if __name__ == "__main__":
    main()
