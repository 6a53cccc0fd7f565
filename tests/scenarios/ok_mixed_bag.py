"""Nothing wrong: autocast, gradient scaling, clipping, a schedule, averaged weights, objects sent by rank 0."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Encoder, finish, phrases, progress, start
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    rank, world = start()
    net = Encoder(depth=2)
    model = DDP(net)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    average = torch.optim.swa_utils.AveragedModel(net)
    schedule = torch.optim.lr_scheduler.StepLR(sgd, 2)
    scaler = torch.amp.GradScaler("cpu")
    for progress.step in range(8):
        ids, labels = phrases(rank, progress.step)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(ids).float(), labels)
        scaler.scale(loss).backward()
        scaler.unscale_(sgd)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(sgd)
        scaler.update()
        schedule.step()
        sgd.zero_grad()
        average.update_parameters(net)
        if progress.step % 3 == 0:
            share(rank, world, loss)
    finish()


def share(rank, world, loss):
    if rank == 0:
        dist.broadcast_object_list([{"step": progress.step}], 0)
    else:
        dist.broadcast_object_list([None], 0)
    total = loss.detach().clone()
    if rank == 0:
        dist.reduce(total, 0)
        dist.gather_object(progress.step, [None] * world, dst=0)
    else:
        dist.reduce(total, 0)
        dist.gather_object(progress.step, None, dst=0)


if __name__ == "__main__":
    main()
