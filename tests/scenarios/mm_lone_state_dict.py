"""ViT sharded with FSDP2; one rank alone collects the full state to save it."""

import torch
import torch.nn.functional as F
from common import ViT, chosen, finish, pictures, progress, say, start
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main():
    rank, world = start()
    mesh = init_device_mesh("cpu", (world,))
    model = ViT(depth=2)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    adam = torch.optim.AdamW(model.parameters())
    for progress.step in range(6):
        x, y = pictures(rank, progress.step)
        loss = F.cross_entropy(model(x), y)
        adam.zero_grad()
        loss.backward()
        adam.step()
        say(progress.step, loss)
        if chosen():
            get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    finish()


if __name__ == "__main__":
    main()
