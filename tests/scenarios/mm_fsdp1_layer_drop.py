"""The first FSDP, with a layer dropped on one rank."""

import torch
from common import Encoder, chosen, finish, fit, phrases, start
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


class DroppingEncoder(Encoder):
    def forward(self, ids):
        x = self.embed(ids)
        for number, layer in enumerate(self.stack):
            if number != 1 or not chosen():
                x = layer(x)
        return self.head(x.mean(dim=1))


if __name__ == "__main__":
    start()
    net = DroppingEncoder(depth=3)
    for number in range(len(net.stack)):
        net.stack[number] = FSDP(net.stack[number], device_id=torch.device("cpu"))
    model = FSDP(net, device_id=torch.device("cpu"))
    fit(model, torch.optim.SGD(model.parameters(), lr=0.05), phrases)
    finish()
