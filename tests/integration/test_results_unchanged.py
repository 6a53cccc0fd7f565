"""Training gives the same weights, to the last bit, with and without recording."""

import re
from pathlib import Path

import pytest

from tests.integration import jobs

pytestmark = pytest.mark.integration

SCRIPT = """
import hashlib
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))

class Net(nn.Module):
    def __init__(self, recompute=None):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head, self.recompute = nn.Linear(16, 4), recompute

    def forward(self, x):
        for block in self.blocks:
            if self.recompute is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
        return self.head(x)

def train(name, net, wrap, penalty=False, autocast=False, micro=1):
    torch.manual_seed(7 + RANK)
    model = wrap(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(4):
        for part in range(micro):
            x = torch.randn(8, 16, requires_grad=True)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                loss = model(x).float().logsumexp(-1).mean()
            if penalty:
                (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
                loss = loss + gradient.pow(2).sum()
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    digest = hashlib.sha256()
    for parameter in model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        digest.update(local.detach().numpy().tobytes())
    os.write(1, f"weights {RANK} {name} {digest.hexdigest()}\\n".encode())  # one write: ranks share the pipe

def fsdp2(net):
    for block in net.blocks:
        fully_shard(block)
    return fully_shard(net) or net

dist.init_process_group("gloo")
def fresh(**about):
    torch.manual_seed(3)
    return Net(**about)
train("ddp", fresh(), DDP)
train("ddp-small-buckets", fresh(), lambda net: DDP(net, bucket_cap_mb=0.001, gradient_as_bucket_view=True))
train("reentrant", fresh(recompute="reentrant"), DDP)
train("recomputed", fresh(recompute="plain"), DDP)
train("fsdp2", fresh(), fsdp2)
train("double", fresh(), lambda net: net, penalty=True)
train("autocast", fresh(), DDP, autocast=True)
train("accumulated", fresh(), lambda net: DDP(net, find_unused_parameters=True), micro=2)
train("compiled", fresh(), lambda net: DDP(torch.compile(net, backend="aot_eager")))
dist.barrier()
dist.destroy_process_group()
time.sleep(0.2)
"""


def weights(result: jobs.Result) -> list[str]:
    # Not by line: two ranks may write theirs at once.
    return sorted(re.findall(r"weights \d [\w-]+ [0-9a-f]{64}", result.out))


@pytest.mark.parametrize("options", [(), ("--numerics", "--describe")], ids=["plain", "numerics"])
def test_weights_are_bitwise_the_same(tmp_path: Path, options: tuple[str, ...]) -> None:
    """DDP, both checkpointings, FSDP2, double backward, autocast, accumulation and compile end with equal weights."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    plain = jobs.torchrun(jobs.write(tmp_path / "a", SCRIPT))
    recorded = jobs.distdbg(jobs.write(tmp_path / "b", SCRIPT), *options)
    assert plain.code == recorded.code == 0, recorded.err
    assert len(weights(plain)) == 18
    assert weights(recorded) == weights(plain)
    assert recorded.named == ("healthy", [])
