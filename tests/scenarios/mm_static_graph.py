"""DDP was told that the graph never changes; one rank leaves a layer out once."""

import torch
from common import Encoder, chosen, finish, fit, phrases, start
from torch.nn.parallel import DistributedDataParallel as DDP


class Shortened(Encoder):
    def forward(self, ids):
        x = self.embed(ids)
        for number, layer in enumerate(self.stack):
            if number != 1 or not chosen():
                x = layer(x)
        return self.head(x.mean(dim=1))


if __name__ == "__main__":
    start()
    model = DDP(Shortened(depth=3), static_graph=True)
    fit(model, torch.optim.SGD(model.parameters(), lr=0.1), phrases)
    finish()
