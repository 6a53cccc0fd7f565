"""A block checkpointed twice in one forward (reentrant) on one rank: DDP finds its parameters ready twice."""

import torch
from common import ViT, chosen, finish, fit, pictures, start
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint


class Twice(ViT):
    def forward(self, images):
        x = self.patch(images).flatten(2).transpose(1, 2)
        for number, layer in enumerate(self.layers):
            for _ in range(2 if number == 1 and chosen() else 1):
                x = checkpoint(layer, x, use_reentrant=True)
        return self.head(x.mean(dim=1))


if __name__ == "__main__":
    start()
    model = DDP(Twice())
    fit(model, torch.optim.SGD(model.parameters(), lr=0.1), pictures)
    finish()
