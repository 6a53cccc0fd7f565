"""Encoder whose layers are all recomputed in backward."""

import torch
from common import Encoder, EncoderLayer, finish, fit, phrases, start
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint


class Recomputed(EncoderLayer):
    reentrant = False

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


if __name__ == "__main__":
    start()
    net = Encoder()
    for number in range(3):
        net.stack[number] = Recomputed(16)
    net.stack[2].reentrant = True
    model = DDP(net)
    fit(model, torch.optim.SGD(model.parameters(), lr=0.1), phrases)
    finish()
