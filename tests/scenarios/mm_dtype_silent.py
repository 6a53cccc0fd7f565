"""ResNet that sums correct answers over the ranks, counted in another type on one."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import ResNet, chosen, finish, pictures, progress, say, start
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    rank, _ = start()
    model = DDP(ResNet(depth=2))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for progress.step in range(6):
        x, y = pictures(rank, progress.step)
        logits = model(x)
        right = (logits.argmax(-1) == y).to(torch.int32 if chosen() else torch.float32)
        dist.all_reduce(right)
        loss = F.cross_entropy(logits, y)
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        say(progress.step, loss)
    finish()


if __name__ == "__main__":
    main()
