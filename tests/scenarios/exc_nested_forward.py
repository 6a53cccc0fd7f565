"""ViT whose activation refuses unusual inputs."""

import torch
from common import ViT, chosen, finish, fit, pictures, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class BoundedGELU(nn.Module):
    def forward(self, x):
        if x.abs().max() > (0.0 if chosen() else 1e6):
            raise ValueError(f"activation out of bounds: {float(x.detach().abs().max()):.3f}")
        return nn.functional.gelu(x)


if __name__ == "__main__":
    start()
    net = ViT()
    net.layers[2].feed[1] = BoundedGELU()
    model = DDP(net)
    fit(model, torch.optim.SGD(model.parameters(), lr=0.1), pictures)
    finish()
