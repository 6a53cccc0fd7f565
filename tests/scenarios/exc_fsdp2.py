"""ViT sharded with FSDP2, with a layer that guards its gradient."""

import torch
from common import ViT, chosen, finish, fit, pictures, start
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class ClampGradFn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, limit):
        ctx.limit = limit
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        if ctx.limit <= 0:
            raise ValueError(f"limit {ctx.limit} is not positive")
        return grad.clamp(-ctx.limit, ctx.limit), None


class ClampGrad(nn.Module):
    def forward(self, x):
        return ClampGradFn.apply(x, -1.0 if chosen() else 1.0)


if __name__ == "__main__":
    _, world = start()
    mesh = init_device_mesh("cpu", (world,))
    model = ViT()
    model.layers[1].extra = ClampGrad()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    fit(model, torch.optim.AdamW(model.parameters()), pictures)
    finish()
