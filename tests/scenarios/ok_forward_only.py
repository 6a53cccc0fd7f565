"""ViT that only predicts; the ranks gather what they found."""

import torch
import torch.distributed as dist
from common import ViT, finish, pictures, start


@torch.inference_mode()
def main():
    rank, world = start()
    model = ViT().eval()
    found = []
    for step in range(10):
        found.append(model(pictures(rank, step)[0]).argmax(-1))
    mine = torch.cat(found)
    everyone = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(everyone, mine)
    if rank == 0:
        print(torch.cat(everyone).bincount().tolist())
    finish()


if __name__ == "__main__":
    main()
