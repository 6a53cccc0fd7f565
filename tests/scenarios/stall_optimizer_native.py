"""Encoder with an optimizer that calls a native library."""

import ctypes

import torch
from common import FOREVER, Encoder, chosen, finish, fit, phrases, start
from torch.nn.parallel import DistributedDataParallel as DDP

library = ctypes.CDLL(None)


class NativeAdam(torch.optim.Adam):
    def step(self, closure=None):
        library.sleep(FOREVER if chosen() else 0)
        return super().step(closure)


if __name__ == "__main__":
    start()
    model = DDP(Encoder())
    fit(model, NativeAdam(model.parameters()), phrases)
    finish()
