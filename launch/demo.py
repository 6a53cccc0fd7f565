"""A small language model under DDP on four ranks: what a user's script looks like. It knows nothing of distdbg.

Rank 2 draws its next batch into the tensor that its embedding has saved for backward (an off-by-one in the
data pipeline's double buffering), and so its backward fails in a C++ node at step 3.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

VOCAB, WIDTH, LENGTH, STEPS = 128, 64, 32, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.size(1)))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Batches:
    """Token batches from two buffers in turn, so that the next one can be filled while one is used."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.generator = torch.Generator().manual_seed(rank)
        self.buffers = [torch.empty(4, LENGTH, dtype=torch.int64) for _ in range(2)]

    def fill(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer.copy_(torch.randint(VOCAB, buffer.shape, generator=self.generator))

    def get(self, step: int) -> torch.Tensor:
        return self.fill(self.buffers[step % 2])

    def prefetch(self, step: int) -> None:
        late = self.rank == 2 and step == 3
        self.fill(self.buffers[(step + (0 if late else 1)) % 2])


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = DDP(LanguageModel())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = Batches(rank)
    for step in range(STEPS):
        ids = batches.get(step)
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        batches.prefetch(step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
