"""PowerSGD compresses gradients in a communication hook, which issues collectives wherever a bucket ends."""

import torch
from common import ViT, finish, fit, pictures, start
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.nn.parallel import DistributedDataParallel as DDP

if __name__ == "__main__":
    start()
    model = DDP(ViT())
    state = power.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=3)
    model.register_comm_hook(state, power.powerSGD_hook)
    fit(model, torch.optim.SGD(model.parameters(), lr=0.1), pictures, steps=10)
    finish()
