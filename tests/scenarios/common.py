"""Small models, data and set-up shared by the training jobs of this folder.

``JOB_RANK`` and ``JOB_STEP`` say which rank misbehaves and when; each job has defaults in truth.json.
"""

import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

WORDS = 48
CLASSES = 6
FOREVER = 600


class Progress:
    """The step of the loop that runs, for modules that want to know."""

    step = 0


progress = Progress()


def start():
    """Join the process group with equal weights everywhere; returns rank and world size."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    return dist.get_rank(), dist.get_world_size()


def finish():
    """Meet once more, then leave."""
    dist.barrier()
    dist.destroy_process_group()
    # torch 2.13 aborts where the interpreter ends while gloo's thread still lets go of its last work, which needs
    # the GIL ("terminate called without an active exception"). A healthy job should not do so now and then.
    time.sleep(0.2)


def job_rank(default=1):
    return int(os.environ.get("JOB_RANK", default))


def job_step(default=2):
    return int(os.environ.get("JOB_STEP", default))


def here(default=1):
    """True on the job's chosen rank."""
    return int(os.environ.get("RANK", "0")) == job_rank(default)


def chosen(step=None, default=1):
    """True on the chosen rank in the chosen step (``step``, or else the running one)."""
    return here(default) and (progress.step if step is None else step) == job_step()


def say(step, loss):
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"step {step}: loss {float(loss.detach()):.3f}", flush=True)


def fit(model, optimizer, draw, steps=6, criterion=F.cross_entropy):
    """The plain loop: draw a batch, forward, backward, optimizer."""
    rank = int(os.environ.get("RANK", "0"))
    for step in range(steps):
        progress.step = step
        inputs, labels = draw(rank, step)
        optimizer.zero_grad()
        loss = criterion(model(inputs), labels)
        loss.backward()
        optimizer.step()
        say(step, loss)


def _random(rank, step):
    return torch.Generator().manual_seed(31 * rank + 7919 * step + 5)


def pictures(rank, step, count=4, side=12):
    g = _random(rank, step)
    return torch.randn(count, 3, side, side, generator=g), torch.randint(CLASSES, (count,), generator=g)


def phrases(rank, step, count=4, length=10):
    g = _random(rank, step)
    return torch.randint(WORDS, (count, length), generator=g), torch.randint(CLASSES, (count,), generator=g)


def points(rank, step, count=8, width=16):
    g = _random(rank, step)
    return torch.randn(count, width, generator=g), torch.randint(CLASSES, (count,), generator=g)


class Attend(nn.Module):
    """Single-head self-attention written out."""

    def __init__(self, width):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.proj(self.combine(q @ k.transpose(1, 2) / q.shape[-1] ** 0.5, v))

    def combine(self, scores, v):
        return scores.softmax(dim=-1) @ v


class VisionLayer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attend = Attend(width)
        self.norm2 = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.extra = nn.Identity()

    def forward(self, x):
        x = x + self.attend(self.norm1(x))
        return x + self.extra(self.feed(self.norm2(x)))


class ViT(nn.Module):
    """A vision transformer on 12x12 pictures."""

    def __init__(self, width=24, depth=3):
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, stride=4)
        self.layers = nn.ModuleList(VisionLayer(width) for _ in range(depth))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, pictures):
        x = self.patch(pictures).flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(dim=1))


class Residual(nn.Module):
    def __init__(self, width, norm):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width) if norm == "batch" else nn.GroupNorm(2, width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.extra = nn.Identity()

    def forward(self, x):
        return F.relu(x + self.extra(self.conv2(F.relu(self.norm(self.conv1(x))))))


class ResNet(nn.Module):
    def __init__(self, width=8, depth=3, norm="group"):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(Residual(width, norm) for _ in range(depth))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, pictures):
        x = F.relu(self.stem(pictures))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=(2, 3)))


class Recurrent(nn.Module):
    """A GRU or LSTM that classifies phrases."""

    def __init__(self, width=16, cell=nn.GRU):
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.cell = cell(width, width, batch_first=True)
        self.extra = nn.Identity()
        self.head = nn.Linear(width, CLASSES)

    def forward(self, phrases):
        states, _ = self.cell(self.embed(phrases))
        return self.head(self.extra(states[:, -1]))


class EncoderLayer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attend = nn.MultiheadAttention(width, 2, batch_first=True)
        self.up = nn.Linear(width, 2 * width)
        self.extra = nn.Identity()
        self.down = nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        x = x + self.attend(x, x, x, need_weights=False)[0]
        return self.norm(x + self.down(F.relu(self.extra(self.up(x)))))


class Encoder(nn.Module):
    """A transformer encoder over phrases."""

    def __init__(self, width=16, depth=3):
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.stack = nn.ModuleList(EncoderLayer(width) for _ in range(depth))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, phrases):
        x = self.embed(phrases)
        for layer in self.stack:
            x = layer(x)
        return self.head(x.mean(dim=1))


class Expert(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


class MoE(nn.Module):
    """Top-1 routed experts; ``route`` may be replaced."""

    def __init__(self, width=16, experts=3):
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(Expert(width) for _ in range(experts))
        self.head = nn.Linear(width, CLASSES)

    def route(self, weights):
        return weights.argmax(dim=-1)

    def forward(self, x):
        weights = self.gate(x).softmax(dim=-1)
        target = self.route(weights)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (target == number).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, number : number + 1])
        return self.head(x + out)


def sync_gradients(model):
    """Average every gradient over the world, one all_reduce each."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
