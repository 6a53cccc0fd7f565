"""The recorder: what runs inside a training process. Importing this package does not import torch.

session.py      start and stop: puts the parts below in place and takes them out again
engine.py       steps in where the autograd engine is called; hooks on every node
modules.py      forward of modules; their names; which module a node belongs to
collectives.py  every collective and point-to-point call, whoever issues it
loop.py         optimizer steps, data loading, checkpoints, garbage collection
capture.py      a failed node: what it received and saved, kept in a bundle
contents.py     what such a bundle holds
replays.py      the node run again, and what that says
errors.py       what an exception was and where it came from
numerics.py     first non-finite values, digests of parameters (on request)
watchdog.py     the beat, stacks when nothing moves, segments prepared ahead
trace.py        one backward, printed as it runs, without a run directory
"""

from distdbg.record.session import Session, current, start, step, stop

__all__ = ["Session", "current", "start", "step", "stop"]
