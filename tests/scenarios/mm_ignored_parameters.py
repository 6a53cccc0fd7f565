"""An Encoder one of whose ranks keeps a layer's parameters out of DDP."""

import torch
from common import Encoder, finish, fit, here, phrases, start
from torch.nn.parallel import DistributedDataParallel as DDP

if __name__ == "__main__":
    start()
    net = Encoder()
    ignored = [f"stack.1.up.{name}" for name in ("weight", "bias")] if here() else []
    DDP._set_params_and_buffers_to_ignore_for_model(net, ignored)
    model = DDP(net)
    fit(model, torch.optim.SGD(model.parameters(), lr=0.1), phrases)
    finish()
