"""ResNet trained by one process, without torch.distributed."""

import torch
from common import ResNet, fit, pictures

if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = ResNet()
    fit(model, torch.optim.SGD(model.parameters(), lr=0.05), pictures)
