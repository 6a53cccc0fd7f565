"""ResNet that keeps the activations of one convolution in a compressed store."""

import torch
from common import ResNet, chosen, finish, fit, pictures, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Stored(nn.Conv2d):
    """A convolution whose saved tensors go through a store."""

    def forward(self, x):
        def load(kept):
            tensor, torn = kept
            return tensor[:, :-1] if torn else tensor

        torn = chosen()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (t, torn and t.shape == x.shape), load):
            return super().forward(x)


if __name__ == "__main__":
    start()
    net = ResNet()
    net.blocks[1].conv2 = Stored(8, 8, 3, padding=1)
    model = DDP(net)
    fit(model, torch.optim.SGD(model.parameters(), lr=0.05), pictures)
    finish()
