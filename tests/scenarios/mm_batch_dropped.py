"""An error in the loop between forward and backward is handled by dropping the batch, on one rank."""

import torch
import torch.nn.functional as F
from common import ResNet, chosen, finish, pictures, progress, say, start
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    rank, _ = start()
    model = DDP(ResNet(), bucket_cap_mb=0.001, broadcast_buffers=False)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    for progress.step in range(6):
        x, y = pictures(rank, progress.step)
        try:
            loss = F.cross_entropy(model(x), y)
            if chosen():
                torch.empty(1 << 60)
            loss.backward()
        except RuntimeError as error:
            print(f"rank {rank}: dropping batch {progress.step}: {error}")
            sgd.zero_grad()
            continue
        sgd.step()
        sgd.zero_grad()
        say(progress.step, loss)
    finish()


if __name__ == "__main__":
    main()
