"""Nothing wrong: a 2x2 mesh, tensor parallel within, FSDP2 across."""

import torch
from common import finish, progress, start
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


def main():
    _, world = start()
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
    net = nn.Sequential(Mlp(), Mlp(), Mlp())
    for block in net:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for block in net:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(net, mesh=mesh["dp"])
    sgd = torch.optim.SGD(net.parameters(), lr=0.01)
    for progress.step in range(6):
        net(torch.randn(4, 16)).pow(2).mean().backward()
        sgd.step()
        sgd.zero_grad()
    finish()


if __name__ == "__main__":
    main()
