"""Small models and Functions whose nodes the tests run again."""

from typing import Any

import torch
import torch.nn.functional as functional
from torch import nn


class Gate(torch.autograd.Function):
    """Two outputs, of which a loss may use one; a plain value on ctx."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor, level: float) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x, bias)
        ctx.level = level
        return x * level + bias, x.exp()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, other: torch.Tensor) -> tuple[Any, ...]:
        x, _ = ctx.saved_tensors
        # the bias's gradient is left in the shape of x: the engine reduces it
        return grad * ctx.level + other * x.exp(), grad, None


class Block(nn.Module):
    """A transformer's block, pre-norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.ln1(x)).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads.unbind(0), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.dropout(functional.gelu(self.up(self.ln2(x))), 0.1))


class GPT(nn.Module):
    """Two blocks, tied to a loss over tokens."""

    def __init__(self, width: int = 16, words: int = 11) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(words, width), nn.Parameter(torch.randn(8, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.ln, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tok(ids) + self.pos
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.ln(x)).flatten(0, 1), ids.flatten())


class ResNet(nn.Module):
    """Two residual blocks with batch norm and pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.max_pool2d(self.stem(x), 2)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = torch.relu(norm(conv(x)) + x)
        return self.head(x.mean((2, 3))).square().mean()


def gpt_loss() -> torch.Tensor:
    torch.manual_seed(1)
    model, ids = GPT(), torch.randint(0, 11, (2, 8))
    loss: torch.Tensor = model(ids)
    return loss


def resnet_loss() -> torch.Tensor:
    torch.manual_seed(2)
    model, pictures = ResNet(), torch.randn(2, 3, 8, 8)
    loss: torch.Tensor = model(pictures)
    return loss


def function_loss() -> torch.Tensor:
    torch.manual_seed(3)
    x, bias = torch.randn(4, 5, requires_grad=True), torch.randn(5, requires_grad=True)
    first, second = Gate.apply(x * 1, bias * 1, 2.0)
    loss: torch.Tensor = first.square().sum() + second.sum()
    return loss
