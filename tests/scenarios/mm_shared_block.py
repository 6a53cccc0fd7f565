"""Two ranks; one runs a checkpointed layer once more, and DDP finds its parameters ready twice."""

import torch
from common import Encoder, chosen, finish, fit, phrases, start
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint


class Deeper(Encoder):
    def forward(self, ids):
        x = self.embed(ids)
        for number, layer in enumerate(self.stack):
            x = checkpoint(layer, x, use_reentrant=True)
            if number == 2 and chosen():
                x = checkpoint(layer, x, use_reentrant=True)
        return self.head(x.mean(dim=1))


if __name__ == "__main__":
    start()
    model = DDP(Deeper())
    fit(model, torch.optim.SGD(model.parameters(), lr=0.1), phrases)
    finish()
