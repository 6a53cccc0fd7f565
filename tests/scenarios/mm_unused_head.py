"""ViT with an auxiliary head, which one rank leaves out in one step."""

import torch
from common import CLASSES, ViT, chosen, finish, fit, pictures, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = ViT(depth=2)
        self.auxiliary = nn.Linear(CLASSES, CLASSES)

    def forward(self, x):
        logits = self.trunk(x)
        return logits if chosen() else logits + 0.1 * self.auxiliary(logits)


if __name__ == "__main__":
    start()
    model = DDP(TwoHeads())
    fit(model, torch.optim.SGD(model.parameters(), lr=0.1), pictures)
    finish()
