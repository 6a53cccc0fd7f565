"""A student learns from a teacher that follows it as a moving average."""

import copy

import torch
import torch.nn.functional as F
from common import Recurrent, finish, phrases, progress, say, start
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    rank, _ = start()
    student = DDP(Recurrent())
    teacher = copy.deepcopy(student.module).requires_grad_(False)
    adam = torch.optim.Adam(student.parameters())
    for progress.step in range(6):
        ids, labels = phrases(rank, progress.step)
        with torch.no_grad():
            target = teacher(ids).softmax(-1)
        out = student(ids)
        loss = F.cross_entropy(out, labels) + F.cross_entropy(out, target)
        adam.zero_grad()
        loss.backward()
        adam.step()
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), student.module.parameters(), strict=False):
                slow.lerp_(fast, 0.1)
        say(progress.step, loss)
    finish()


if __name__ == "__main__":
    main()
