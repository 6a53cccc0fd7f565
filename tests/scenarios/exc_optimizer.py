"""GRU classifier with a hand-written optimizer."""

import torch
from common import Recurrent, chosen, finish, fit, phrases, start
from torch.nn.parallel import DistributedDataParallel as DDP


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                if chosen():
                    momentum = momentum.flatten()[:-1]
                momentum.lerp_(p.grad, 0.1)
                p.sub_(momentum.sign(), alpha=group["lr"])


if __name__ == "__main__":
    start()
    model = DDP(Recurrent())
    fit(model, Lion(model.parameters(), lr=1e-3), phrases)
    finish()
