"""A ResNet whose buffers come in another order on one rank, so that DDP's broadcasts of them do not fit."""

import torch
from common import ResNet, finish, fit, here, pictures, start
from torch.nn.parallel import DistributedDataParallel as DDP


class Counted(ResNet):
    def __init__(self):
        super().__init__(norm="batch")
        names = {"seen": torch.zeros(5, dtype=torch.int64), "scale": torch.ones(3)}
        for name in sorted(names, reverse=here()):
            self.register_buffer(name, names[name])


if __name__ == "__main__":
    start()
    model = DDP(Counted())
    fit(model, torch.optim.SGD(model.parameters(), lr=0.1), pictures)
    finish()
