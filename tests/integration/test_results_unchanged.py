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
train("static", fresh(recompute="plain"), lambda net: DDP(net, static_graph=True))
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
    assert len(weights(plain)) == 20
    assert weights(recorded) == weights(plain)
    assert recorded.named == ("healthy", [])


DOORS = """
import copy, hashlib, pickle, threading, warnings
import torch.nn.functional as F
from torch.func import functional_call, grad, hessian, jacrev, vmap

def show(name, *tensors):
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    os.write(1, f"{name} {digest.hexdigest()}\\n".encode())

class Halve(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x / 2
    @staticmethod
    def backward(ctx, g):
        return g / 2

def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))

def grads(model):
    return [p.grad for p in model.parameters() if p.grad is not None]

x = torch.randn(6, 8)

# Hooks of the user's own, on the same nodes, tensors and modules, some of which change what passes.
model, seen = net(), []
model[0].register_forward_pre_hook(lambda m, a: (a[0] * 1.5,))
model[1].register_forward_hook(lambda m, a, out: out + 0.25)
model[3].register_full_backward_pre_hook(lambda m, g: (g[0] * 2,))
model[3].register_full_backward_hook(lambda m, gi, go: (gi[0] * 3,))
model[0].weight.register_hook(lambda g: g * 0.5)
model[0].bias.register_post_accumulate_grad_hook(lambda p: seen.append(float(p.grad.sum())))
out = Halve.apply(model(x)).square().sum()
out.grad_fn.register_prehook(lambda g: (g[0] * 1.1,))
out.grad_fn.register_hook(lambda gi, go: tuple(g * 0.9 for g in gi))
out.backward()
show("hooks", *grads(model), torch.tensor(seen))

# One graph walked several times, from several roots, and in part.
model = net()
loss = model(x).square().mean()
loss.backward(retain_graph=True)
loss.backward(retain_graph=True)
loss.backward()
show("retained", *grads(model))
y = torch.randn(5, requires_grad=True)
a, b = y.exp(), y.sin()
torch.autograd.backward([a.sum(), b.sum()], [torch.tensor(2.0), None], inputs=[y])
show("roots", y.grad, *torch.autograd.grad([(y ** 3).sum(), y.prod()], [y], allow_unused=True))
edge = torch.autograd.graph.get_gradient_edge(y.cosh())
show("edge", *torch.autograd.grad(edge, [y], torch.ones(5)))
(first,) = torch.autograd.grad(y.pow(4).sum(), y, create_graph=True)
(second,) = torch.autograd.grad(first.sum(), y, create_graph=True)
show("double", first, second, *torch.autograd.grad(second.sum(), y))

# torch.func, with and without vmap.
params = dict(net().named_parameters())
loss_of = lambda p, row: functional_call(model, p, row[None]).square().sum()
show("func", *grad(loss_of)(params, x[0]).values())
show("per-sample", *vmap(grad(loss_of), in_dims=(None, 0))(params, x).values())
show("jacobian", jacrev(model)(x[0]), hessian(lambda r: model(r[None]).sum())(x[0]))

# An optimizer within backward, anomaly mode, saved tensors elsewhere, in-place, checkpoint of a copy.
model = net()
optimizers = {p: torch.optim.Adam([p], foreach=False) for p in model.parameters()}
def within(p):
    optimizers[p].step()
    optimizers[p].zero_grad()
for p in model.parameters():
    p.register_post_accumulate_grad_hook(within)
for _ in range(3):
    model(x).square().mean().backward()
show("within", *model.parameters())
model = net()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    with torch.autograd.detect_anomaly():
        model(x).square().mean().backward()
with torch.autograd.graph.saved_tensors_hooks(lambda t: t.numpy().copy(), torch.from_numpy):
    model(x).square().mean().backward()
show("saved", *grads(model))
twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
torch.save(twin.state_dict(), "twin.pt")
twin.load_state_dict(torch.load("twin.pt"))
show("copied", twin(x), torch.jit.script(twin)(x), torch.jit.trace(twin, x)(x))
show("exported", torch.export.export(twin, (x,), strict=True).module()(x))
pickle.loads(pickle.dumps((torch.save, dist.init_process_group, torch.autograd.backward)))

# Evaluation, and threads that walk graphs of their own and one that they share.
model.eval()
with torch.no_grad():
    show("no_grad", model(x))
with torch.inference_mode():
    show("inference", model(x).clone())
results, nets = [None] * 4, [net() for _ in range(4)]  # made here: the generator is shared
def work(i):
    own = nets[i]
    for _ in range(5):
        own(x * (i + 1)).square().mean().backward()
    results[i] = grads(own)
    for _ in range(5):
        shared(x).square().mean().backward()
shared = net()
threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
[t.start() for t in threads]
[t.join() for t in threads]
for i in range(4):
    show(f"thread{i}", *results[i])

# A chain too long to be walked in Python, kept alive by its loss.
z = torch.ones(2, requires_grad=True)
long = z
for _ in range(60_000):
    long = long * 1.00001
long.sum().backward()
show("chain", z.grad)
del long
for backend in ("eager", "aot_eager"):
    model = net()
    torch.compile(model, backend=backend)(x).square().mean().backward()
    show(backend, *grads(model))
print("done")
"""


@pytest.mark.parametrize("options", [(), ("--numerics", "--describe")], ids=["plain", "numerics"])
def test_every_door_of_torch(tmp_path: Path, options: tuple[str, ...]) -> None:
    """Hooks, retained graphs, torch.func, optimizers within backward, threads, export: bit by bit as without."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    plain = jobs.torchrun(jobs.write(tmp_path / "a", DOORS), nproc=1)
    recorded = jobs.distdbg(jobs.write(tmp_path / "b", DOORS), *options, nproc=1)
    assert plain.code == 0, plain.err
    assert recorded.code == 0, recorded.err
    assert len(plain.out.splitlines()) > 20
    assert recorded.out == plain.out
    assert "distdbg" not in "".join(line for line in recorded.err.splitlines() if "Warning" in line)
    assert recorded.named == ("healthy", [])
