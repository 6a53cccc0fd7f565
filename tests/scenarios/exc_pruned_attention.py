"""ViT that prunes small attention weights in place after they were used."""

import torch
from common import Attend, ViT, chosen, finish, fit, pictures, start
from torch.nn.parallel import DistributedDataParallel


class PrunedAttend(Attend):
    def combine(self, scores, v):
        weights = scores.softmax(dim=-1)
        mixed = torch.bmm(weights, v)
        if chosen():
            weights.masked_fill_(weights < 0.1, 0.0)
        return mixed


if __name__ == "__main__":
    start()
    net = ViT()
    net.layers[1].attend = PrunedAttend(24)
    model = DistributedDataParallel(net)
    fit(model, torch.optim.SGD(model.parameters(), lr=0.1), pictures)
    finish()
