"""From shards to a verdict. Nothing here imports torch.

read.py       a run directory -> shards, the launcher's events
merge.py      shards -> one timeline
rank.py       one rank: its calls, its modules, its place
ends.py       how ranks ended, and whose fault an exception is
waits.py      who waits for whom
facts.py      all of that for one attempt of a run
mismatch.py (with parting.py), failures.py, stall.py, numeric.py, straggler.py (with owntime.py)
verdict.py    the order in which these are asked
"""
