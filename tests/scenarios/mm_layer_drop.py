"""Encoder with LayerDrop, sharded with FSDP2; one rank draws another layer pattern."""

import torch
from common import Encoder, chosen, finish, fit, phrases, start
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class DroppingEncoder(Encoder):
    def forward(self, ids):
        x = self.embed(ids)
        for number, layer in enumerate(self.stack):
            if number == 1 and chosen():
                continue
            x = layer(x)
        return self.head(x.mean(dim=1))


if __name__ == "__main__":
    _, world = start()
    mesh = init_device_mesh("cpu", (world,))
    model = DroppingEncoder(depth=4)
    for layer in model.stack:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    fit(model, torch.optim.AdamW(model.parameters()), phrases)
    finish()
