"""A failed node, kept on disk and run again alone. Importing this package does not import torch.

bundle.py      the format: JSON and safetensors in a folder; writing, reading, checking
values.py      plain values of a Function's context as JSON, and back
describe.py    a tensor in numbers: shape, dtype, strides, finite or not, min, max, norm
node.py        one living node, called alone, with the checks that the engine adds
context.py     a stand-in for a Function's ctx
operations.py  C++ nodes whose operation can be rebuilt from what they saved
rerun.py       a bundle's node run again in a process without the job
compare.py     the same node on several ranks: what differs in what came in
"""

from distdbg.replay.bundle import Bundle, load_bundle

__all__ = ["Bundle", "load_bundle"]
