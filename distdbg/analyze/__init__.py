"""From shards to a verdict. Nothing here imports torch.

read.py       a run directory -> shards, the launcher's events
merge.py      shards -> one timeline
rank.py       one rank: its calls, its modules, its place
ends.py       how ranks ended, and whose fault an exception is
waits.py      who waits for whom
facts.py      all of that for one attempt of a run
flight.py     dumps of PyTorch's Flight Recorder (with flight_pickle.py); flight_groups.py: what they say together;
              flight_verdict.py: a verdict from them alone; flight_beside.py, flight_mismatch.py: beside shards
mismatch.py (with parting.py), failures.py, stall.py, numeric.py, straggler.py (with owntime.py)
verdict.py    the order in which these are asked
"""
