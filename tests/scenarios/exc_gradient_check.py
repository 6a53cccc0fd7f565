"""Encoder that checks a gradient in a tensor hook."""

import torch
from common import Encoder, chosen, finish, fit, phrases, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Checked(nn.Module):
    def forward(self, x):
        y = torch.relu(x)
        limit = 0.0 if chosen() else 1e9

        def check(grad):
            if grad.norm() > limit:
                raise FloatingPointError(f"gradient norm {grad.norm():.4f} above {limit}")

        y.register_hook(check)
        return y


if __name__ == "__main__":
    start()
    net = Encoder()
    net.stack[1].extra = Checked()
    model = DDP(net)
    fit(model, torch.optim.AdamW(model.parameters()), phrases)
    finish()
