"""Eight ranks, one of which registers a buffer more than the others: DDP's broadcasts of buffers differ in size."""

import torch
from common import Recurrent, finish, fit, here, phrases, start
from torch.nn.parallel import DistributedDataParallel as DDP

if __name__ == "__main__":
    start()
    net = Recurrent()
    net.register_buffer("seen", torch.zeros(7))
    if here():
        net.register_buffer("average", torch.zeros(5))
    model = DDP(net)
    fit(model, torch.optim.SGD(model.parameters(), lr=0.1), phrases)
    finish()
