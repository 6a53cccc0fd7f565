"""Trains from a map-style dataset one record of which is corrupt."""

import torch
import torch.nn.functional as F
from common import CLASSES, ResNet, finish, here, job_step, say, start
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset


class Records(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        if here() and index == 4 * job_step() + 1:
            raise ValueError(f"record {index}: bad checksum")
        return torch.full((3, 8, 8), index / 24), index % CLASSES


def main():
    start()
    model = DDP(ResNet(depth=2))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, (images, labels) in enumerate(DataLoader(Records(), batch_size=4)):
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        sgd.step()
        sgd.zero_grad()
        say(number, loss)
    finish()


if __name__ == "__main__":
    main()
