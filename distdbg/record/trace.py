"""One backward in this process, printed node by node as it runs: no launcher, no run directory.

For the question that starts it all: which node is it in, and what do its hooks receive?
"""

import sys
from typing import Any, TextIO

from distdbg.record.engine import root_nodes, walk


def _text(tensors: Any) -> str:
    parts = []
    for tensor in tensors:
        if tensor is None:
            parts.append("None")
        else:
            parts.append(f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}")
    return f"({', '.join(parts)})"


class _Tracer:
    """Hooks of one traced backward; holds names and numbers, no node and no tensor."""

    def __init__(self, out: TextIO) -> None:
        self.out = out
        self.entered = 0
        self.left = 0
        self.open: list[str] = []

    def hooks(self, name: str) -> tuple[Any, Any]:
        def pre(grads: Any) -> None:
            self.entered += 1
            self.open.append(name)
            print(f"  > {self.entered - 1:4d} {name:<32} received {_text(grads)}", file=self.out)

        def post(outputs: Any, inputs: Any) -> None:
            self.left += 1
            if name in self.open:
                self.open.remove(name)
            print(f"  <      {name:<32} returned {_text(outputs)}", file=self.out)

        return pre, post


def trace(loss: Any, *, file: TextIO | None = None, **kwargs: Any) -> None:
    """Run ``loss.backward(**kwargs)`` and print each node as it is entered and left, to ``file`` (stdout).

    ``loss`` is a tensor. What the backward raises is raised here, after the node that was entered and not
    left has been named. Every hook is removed in the end.
    """
    out = file or sys.stdout
    nodes, truncated = walk(root_nodes([loss]))
    tracer = _Tracer(out)
    handles = []
    try:
        for node in nodes:
            pre, post = tracer.hooks(node.name().removeprefix("torch::autograd::"))
            handles += [node.register_prehook(pre), node.register_hook(post)]
        del nodes
        more = " (the walk was cut short: the graph is too deep)" if truncated else ""
        print(f"backward of {len(handles) // 2} nodes{more}", file=out)
        loss.backward(**kwargs)
        print(f"done: {tracer.left} nodes ran", file=out)
    except BaseException as error:
        inner = tracer.open[-1] if tracer.open else "no node (between two of them)"
        print(f"  ! {type(error).__name__} in {inner}: {error}", file=out)
        raise
    finally:
        for handle in handles:
            handle.remove()
