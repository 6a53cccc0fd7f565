"""One rank hangs in forward; the others' group gives up after a few seconds."""

import datetime
import time

import torch
import torch.distributed as dist
from common import FOREVER, ViT, chosen, finish, fit, pictures
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Wait(nn.Module):
    def forward(self, x):
        if chosen():
            time.sleep(FOREVER)
        return x


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=5))
    torch.manual_seed(1)
    net = ViT()
    net.layers[2].extra = Wait()
    model = DDP(net)
    fit(model, torch.optim.SGD(model.parameters(), lr=0.1), pictures)
    finish()
