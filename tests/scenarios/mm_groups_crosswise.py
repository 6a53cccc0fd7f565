"""Four ranks in two pairs; a pair has one group for tensors and one for experts."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Recurrent, chosen, finish, phrases, progress, say, start


def pairs():
    made = [dist.new_group([first, first + 1]) for first in (0, 2)]
    return made[dist.get_rank() // 2]


def main():
    rank, _ = start()
    tensors, experts = pairs(), pairs()
    model = Recurrent()
    adam = torch.optim.Adam(model.parameters())
    for progress.step in range(6):
        ids, labels = phrases(rank, progress.step)
        loss = F.cross_entropy(model(ids), labels)
        adam.zero_grad()
        loss.backward()
        work = [(model.embed.weight.grad, tensors), (model.head.weight.grad, experts)]
        if chosen():
            work.reverse()
        for grad, group in work:
            dist.all_reduce(grad, group=group)
        adam.step()
        say(progress.step, loss)
    finish()


if __name__ == "__main__":
    main()
