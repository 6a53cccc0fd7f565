"""Trains from a dataset read by two worker processes."""

import torch
import torch.nn.functional as F
from common import CLASSES, ResNet, finish, here, job_step, say, start
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset


class Crops(Dataset):
    offsets = tuple(range(24))

    def __len__(self):
        return 24

    def __getitem__(self, index):
        shift = self.offsets[index + (24 if here() and index == 4 * job_step() else 0)]
        return torch.full((3, 8, 8), shift / 24), index % CLASSES


def main():
    start()
    model = DDP(ResNet(depth=1))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, (images, labels) in enumerate(DataLoader(Crops(), batch_size=4, num_workers=2)):
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        sgd.step()
        sgd.zero_grad()
        say(number, loss)
    finish()


if __name__ == "__main__":
    main()
