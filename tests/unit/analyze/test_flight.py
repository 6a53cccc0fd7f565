"""Flight Recorder dumps: read whatever is in them and run none of it, and say only what they can tell."""

import json
import os
import pickle
import pickletools
import random
from pathlib import Path
from typing import Any

import pytest

from distdbg import schema
from distdbg.analyze import flight, flight_pickle
from distdbg.analyze.flight import files_at, operation, read_all, read_dump
from distdbg.analyze.verdict import diagnose
from distdbg.cli.diagnose import main
from distdbg.errors import DistdbgError, DumpError, RunDirError
from distdbg.report import terminal
from distdbg.schema import EventKind as K
from tests.unit import shards
from tests.unit.flights import BEGIN, SECOND, TAKEN, Recorder, job, train
from tests.unit.shards import launcher


def named(verdict: dict[str, Any]) -> tuple[str, list[int]]:
    return verdict["kind"], [culprit["rank"] for culprit in verdict["culprits"]]


def write(ranks: list[Recorder], folder: Path, **how: Any) -> None:
    folder.mkdir(exist_ok=True)
    for rank in ranks:
        rank.write(folder / "nccl_trace_rank_", **how)


# ---- the reader of pickles


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_values_are_read_as_pickle_reads_them(protocol: int) -> None:
    """Numbers, text, lists, tuples, dicts, shared and nested ones, come out as they went in."""
    shared = {"name": "f", "line": 3}
    value = {
        "a": [1, -1, 255, 256, 65536, 2**40, -(2**60), 1.5, True, False, None, "ä" * 300],
        "b": [b"x", b"y" * 300] if protocol > 2 else [],
        "t": ((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)),
        "s": [shared, shared, {7: []}],
        "many": list(range(2000)),
    }
    read = flight_pickle.loads(pickle.dumps(value, protocol))
    assert read == value
    assert read["s"][0] is read["s"][1]


class Harmful:
    """Runs a command when Python's own reader meets it."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


def harmful(mark: Path) -> list[bytes]:
    command = f"touch {mark}".encode()
    return [
        *(pickle.dumps({"entries": [Harmful(mark)]}, protocol) for protocol in (2, 4, 5)),
        b"\x80\x02(cos\nsystem\nU" + bytes([len(command)]) + command + b"tR.",
        b"\x80\x02(U" + bytes([len(command)]) + command + b"ios\nsystem\n.",
        b"\x80\x02cos\nsystem\n(U" + bytes([len(command)]) + command + b"o.",
        b"\x80\x02Pmodule.object\n.",
        b"\x80\x02U\x01xQ.",
        b"\x80\x02\x82\x01.",
        b"\x80\x02}}b.",
        b"\x80\x05\x97.",
    ]


@pytest.mark.parametrize("number", range(11))
def test_a_harmful_pickle_is_refused_and_runs_nothing(tmp_path: Path, number: int) -> None:
    """An opcode that names a class, calls, builds or asks for an object ends the reading, named with file and rank."""
    mark = tmp_path / "mark"
    file = tmp_path / "trace_rank_3"
    file.write_bytes(harmful(mark)[number])
    with pytest.raises(DumpError, match=r"trace_rank_3 \(rank 3\) holds more than plain values .*copy it again"):
        read_dump(file)
    assert not mark.exists()


def test_only_opcodes_of_plain_values_are_known() -> None:
    """No opcode that can call something is among the handlers; a new one of Python's would not be either."""
    calling = {"GLOBAL", "STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "REDUCE", "BUILD", "PERSID", "BINPERSID"}
    calling |= {"EXT1", "EXT2", "EXT4", "NEXT_BUFFER", "READONLY_BUFFER", "BYTEARRAY8"}
    by_code = {ord(op.code): op.name for op in pickletools.opcodes}
    known = {by_code[code] for code in flight_pickle._HANDLERS}
    assert not known & calling
    assert len(known) == len(flight_pickle._BY_NAME)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\x80\x02}", "truncated"),
        (b"\x80\x02", "truncated"),
        (b"\x80\x02X\xff\xff\xff\xffabc.", "truncated"),
        (b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7fabc.", "truncated"),
        (b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\xffabc.", "truncated"),
        (b"\x80\x02\x8b\xff\xff\xff\x7f.", "number of"),
        (b"\x80\x02\x8b\xff\xff\xff\xff.", "number of"),
        (b"\x80\x02h\x07.", "refers to what is not there"),
        (b"\x80\x02q\x07.", "nothing to keep"),
        (b"\x80\x04\x94.", "nothing to keep"),
        (b"\x80\x02e.", "no beginning"),
        (b"\x80\x02(.", "no single value"),
        (b"\x80\x02.", "no single value"),
        (b"\x80\x02}}.", "no single value"),
        (b"\x80\x02\x86.", "values are missing"),
        (b"\x80\x02(K\x01\x86.", "values are missing"),
        (b"\x80\x02}(K\x01u.", "key without a value"),
        (b"\x80\x02}](u.", "another kind"),
        (b"\x80\x02K\x01K\x01a.", "another kind"),
        (b"\x80\x02})K\x01s.", "neither text nor numbers"),
    ],
)
def test_damaged_pickles(data: bytes, words: str) -> None:
    """Whatever stands in the bytes, the reader ends with a word about them."""
    if words == "another kind" and data.endswith(b"(u."):
        data = b"\x80\x02](K\x01K\x02u."
    with pytest.raises(flight_pickle.PickleError, match=words):
        flight_pickle.loads(data)


def test_a_dump_cut_anywhere_is_told(tmp_path: Path) -> None:
    """A dump whose writing was broken off is an error, wherever it broke off."""
    whole = pickle.dumps(Recorder(0, 2).call().dump(), 2)
    for length in range(2, len(whole), 7):
        with pytest.raises(flight_pickle.PickleError):
            flight_pickle.loads(whole[:length])
    file = tmp_path / "d_0"
    file.write_bytes(whole[:-50])
    with pytest.raises(DumpError, match=r"\(rank 0\) is truncated; copy it again"):
        read_dump(file)


def test_a_small_file_makes_no_large_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists that refer to each other or nest without end cost what the file has bytes; values are limited."""
    doubling = b"\x80\x02]q\x00" + b"".join(b"(h%ch%ce]q%c" % (n, n, n + 1) for n in range(100)) + b"0."
    with pytest.raises(flight_pickle.PickleError):
        flight_pickle.loads(doubling)
    deep = flight_pickle.loads(b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".")
    assert len(deep) == 1
    monkeypatch.setattr(flight_pickle, "MAX_VALUES", 50)
    with pytest.raises(flight_pickle.PickleError, match="more than 50 values"):
        flight_pickle.loads(pickle.dumps(list(range(100)), 2))


# ---- files


def test_foreign_empty_and_huge_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is an error of its own that names the file, the rank and what to do."""
    for name, data, words in [
        ("a_1", b"", r"a_1 \(rank 1\) is empty"),
        ("a_2", b"hello", r"a_2 \(rank 2\) is neither"),
        ("a_3", b"[" * 100_000, r"a_3 \(rank 3\) is neither"),
        ("a_4", b"[1, 2]", r"a_4 \(rank 4\) is no Flight Recorder dump"),
        ("a_5", b'{"entries": 3}', r"a_5 \(rank 5\) is no Flight Recorder dump"),
        ("a_6", pickle.dumps([1]), r"a_6 \(rank 6\) is no Flight Recorder dump"),
        ("noname", pickle.dumps({"entries": []}), "neither in the dump nor in its name"),
    ]:
        (tmp_path / name).write_bytes(data)
        with pytest.raises(DumpError, match=words):
            read_dump(tmp_path / name)
    with pytest.raises(DumpError, match=r"gone_1 \(rank 1\) cannot be read .*copy it again"):
        read_dump(tmp_path / "gone_1")
    monkeypatch.setattr(flight, "MAX_DUMP_BYTES", 4)
    with pytest.raises(DumpError, match=r"TORCH_FR_BUFFER_SIZE"):
        read_dump(tmp_path / "a_2")


def test_nonsense_in_fields_is_left_out(tmp_path: Path) -> None:
    """Entries and fields of other kinds than they should be cost themselves and nothing else."""
    rank = Recorder(0, 2).call()
    odd: list[Any] = [
        None, 7, {}, {"profiling_name": 3}, {"profiling_name": "nccl:all_reduce", "collective_seq_id": "x"},
        {"profiling_name": "nccl:all_reduce", "collective_seq_id": 1e999},
        {"profiling_name": "x", "collective_seq_id": 2, "process_group": {"a": 1}, "input_sizes": [["a"]],
         "input_dtypes": 3, "frames": [1, {"filename": 3}], "time_created_ns": [], "record_id": None, "state": []},
    ]  # fmt: skip
    found = {**rank.dump(), "entries": rank.entries + odd, "pg_config": {"0": 3, "1": {"ranks": "[1, __import__]"}}}
    (tmp_path / "d_0").write_bytes(pickle.dumps(found, 2))
    dump = read_dump(tmp_path / "d_0")
    assert [call.op for call in dump.calls] == ["all_reduce", "x"]
    assert dump.members == {}
    assert any("6 entries are not as they should be" in problem for problem in dump.problems)


def test_ranks_from_names_folders_and_the_dump(tmp_path: Path) -> None:
    """The rank is told by the dump, else by the name's "rank", else by its last number, else by the shard's folder."""
    assert flight.rank_of(Path("/tmp/nccl_trace_rank_12")) == 12
    assert flight.rank_of(Path("host4-rank3-9999.pickle")) == 3
    assert flight.rank_of(Path("dump7.json")) == 7
    assert flight.rank_of(Path("x/rank00002-attempt000-host-17/flight-recorder.json")) == 2
    assert flight.rank_of(Path("notes.txt")) is None
    (tmp_path / "d_5").write_bytes(pickle.dumps({**Recorder(0, 2).dump(), "rank": 1}, 2))
    dump = read_dump(tmp_path / "d_5")
    assert dump.rank == 1
    assert "its name says 5" in dump.problems[0]


def test_a_file_a_folder_and_a_prefix(tmp_path: Path) -> None:
    """All three stand for dumps; other files of the folder are passed by; nothing there is an error."""
    write(job(3), tmp_path / "dumps")
    (tmp_path / "dumps" / "train_1.py").write_text("import torch")
    (tmp_path / "dumps" / "log_2").write_text("hello")
    folder = files_at(tmp_path / "dumps")
    assert [file.name for file in folder] == [f"nccl_trace_rank_{rank}" for rank in range(3)]
    assert files_at(tmp_path / "dumps" / "nccl_trace_rank_") == folder
    assert files_at(folder[1]) == [folder[1]]
    for nothing in (tmp_path / "gone", tmp_path):
        with pytest.raises(DumpError, match="no Flight Recorder dump there; give"):
            files_at(nothing)


def test_the_newer_of_two_dumps_and_pickles_before_json(tmp_path: Path) -> None:
    """Of one rank's dumps the later counts; of a pair written together the one that has the stacks."""
    rank = Recorder(0, 1).call()
    old = rank.write(tmp_path / "old_", taken=TAKEN - 9 * SECOND)
    rank.call()
    both = [rank.write(tmp_path / "new_"), rank.write(tmp_path / "new_", as_json=True)]
    found = read_all([*both, old], [])
    assert found[0].file == both[0]
    assert read_all([old, both[1]], [])[0].calls[-1].seq == 2


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("all_reduce", "all_reduce"), ("ALLREDUCE", "all_reduce"), ("allreduce_coalesced", "all_reduce"),
        ("_all_gather_base", "all_gather"), ("ALLGATHER_coalesced", "all_gather"), ("all_gather_v", "all_gather"),
        ("_reduce_scatter_base", "reduce_scatter"), ("reduce_scatter_single", "reduce_scatter"),
        ("all_to_all_v_single", "all_to_all"), ("_broadcast_oop", "broadcast"), ("_reduce_oop", "reduce"),
        ("all_reduce_barrier", "barrier"), ("gather", "gather"), ("scatter", "scatter"), ("coalesced", "coalesced"),
        ("something_new", "something_new"), ("send 0->1", "send"), ("recv 3<-0", "recv"),
    ],
)  # fmt: skip
def test_operations_have_one_name(name: str, op: str) -> None:
    """The names that the backends use come down to those of the contract."""
    assert operation(name)[0] == op


def test_whose_message_it_is() -> None:
    """A message's name tells the other end, as the group numbers its ranks."""
    assert operation("send 0->1") == ("send", 1)
    assert operation("recv 3<-0") == ("recv", 0)
    assert operation("send") == ("send", None)


def test_phases_come_from_the_stack(tmp_path: Path) -> None:
    """Where torch's own frames show a backward, forward or optimizer around the call, that is its phase."""
    rank = Recorder(0, 1)
    for inside in (
        "",
        "/env/site-packages/torch/autograd/graph.py",
        "/env/site-packages/torch/nn/modules/module.py",
        "/env/site-packages/torch/optim/optimizer.py",
    ):
        rank.call(inside=inside)
    calls = read_dump(rank.write(tmp_path / "d_")).calls
    assert [call.phase for call in calls] == ["collective", "backward", "forward", "optimizer"]
    assert {call.source for call in calls} == {"train.py:12"}


def test_damaged_dumps_end_in_a_verdict_or_an_error(tmp_path: Path) -> None:
    """Dumps with bytes changed at random never end in another exception than the project's own."""
    chance = random.Random(7)
    ranks = job(3, groups={"1": ("tp", (0, 1))})
    train(ranks, 3)
    ranks[0].call("send 0->1", p2p=True).call(group="1").call(ended=False)
    whole = [pickle.dumps(rank.dump(), 2) for rank in ranks] + [json.dumps(rank.dump()).encode() for rank in ranks]
    for _ in range(150):
        for rank in range(3):
            data = bytearray(chance.choice((whole[rank], whole[rank + 3])))
            for _ in range(chance.randint(1, 4)):
                data[chance.randrange(len(data))] = chance.randrange(256)
            (tmp_path / f"d_{rank}").write_bytes(data)
        try:
            terminal.render(diagnose(tmp_path)).encode()
        except DistdbgError:
            continue


def test_half_a_surrogate_pair(tmp_path: Path) -> None:
    """What no stream can print is replaced."""
    rank = Recorder(0, 1).call(ended=False)
    text = json.dumps(rank.dump()).replace("default_pg", "\\ud800").replace("train.py", "\\udfff.py")
    (tmp_path / "d_0").write_text(text)
    json.dumps(diagnose(tmp_path), ensure_ascii=False).encode()


# ---- verdicts from dumps alone


@pytest.mark.parametrize("as_json", [False, True])
def test_a_rank_that_did_not_issue_a_call(tmp_path: Path, as_json: bool) -> None:
    """The rank that finished #16 and stands in nothing is named, modestly; the others wait for it."""
    ranks = job(4)
    train(ranks, 16)
    for rank in (ranks[0], ranks[1], ranks[3]):
        rank.call(ended=False)
    write(ranks, tmp_path / "d", as_json=as_json)
    verdict = diagnose(tmp_path / "d")
    assert named(verdict) == ("stalled", [2])
    culprit = verdict["culprits"][0]
    assert (culprit["collective"], culprit["group"], culprit["step"]) == ("all_reduce", "default_pg", None)
    assert culprit["node"] is None
    assert culprit["module"] is None
    assert verdict["confidence"] <= 0.7
    assert [(v["rank"], v["waits_for"]) for v in verdict["victims"]] == [(0, [2]), (1, [2]), (3, [2])]
    assert "all_reduce #17 of default_pg" in verdict["victims"][0]["in"]
    assert any("rank 2: its last call of that group is all_reduce #16" in line for line in verdict["evidence"])
    assert set(verdict) == {
        "schema", "kind", "summary", "cause", "culprits", "victims", "evidence", "ruled_out", "confidence",
        "world_size", "attempt", "missing_ranks",
    }  # fmt: skip


def test_a_rank_that_left_no_dump(tmp_path: Path) -> None:
    """Of a rank without a dump nothing is known, and nobody is named; the verdict says where to look."""
    ranks = job(4)
    train(ranks, 16)
    for rank in ranks:
        rank.call(ended=False)
    write([ranks[0], ranks[1], ranks[3]], tmp_path / "d")
    verdict = diagnose(tmp_path / "d")
    assert named(verdict) == ("unknown", [])
    assert "rank 2 left no dump" in verdict["summary"]
    assert verdict["missing_ranks"] == [2]
    assert verdict["world_size"] == 4


def test_one_dump_of_several_harmful(tmp_path: Path) -> None:
    """A dump that is refused counts as none, and the verdict says so."""
    ranks = job(3)
    train(ranks, 3)
    for rank in ranks:
        rank.call(ended=False)
    write(ranks, tmp_path / "d")
    (tmp_path / "d" / "nccl_trace_rank_1").write_bytes(pickle.dumps(Harmful(tmp_path / "mark"), 2))
    verdict = diagnose(tmp_path / "d")
    assert named(verdict) == ("unknown", [])
    assert any("nccl_trace_rank_1 (rank 1) holds more than plain values" in line for line in verdict["evidence"])
    assert not (tmp_path / "mark").exists()


def test_all_dumps_unreadable(tmp_path: Path) -> None:
    """A folder in which no dump can be read is an error, not a verdict."""
    (tmp_path / "d_0").write_bytes(b"\x80\x02}")
    with pytest.raises(DumpError, match="truncated"):
        diagnose(tmp_path)
    with pytest.raises(RunDirError):
        diagnose(tmp_path / "gone")


def test_shapes_that_differ(tmp_path: Path) -> None:
    """The one rank whose call has another size is named, with its line; it is a mismatch though all wait alike."""
    ranks = job(3)
    train(ranks, 4)
    for rank in ranks:
        rank.call(size=7 if rank.rank == 1 else 8, ended=False, line=30)
    write(ranks, tmp_path / "d")
    verdict = diagnose(tmp_path / "d")
    assert named(verdict) == ("mismatch", [1])
    culprit = verdict["culprits"][0]
    assert (culprit["phase"], culprit["source"], culprit["collective"]) == ("collective", "train.py:30", "all_reduce")
    assert "all_reduce #5 of default_pg" in verdict["summary"]
    assert "float32[7]" in verdict["cause"]
    assert "float32[8]" in verdict["cause"]


@pytest.mark.parametrize("what", ["operation", "dtype"])
def test_operations_and_types_that_differ(tmp_path: Path, what: str) -> None:
    """Another operation or type in the same call is a mismatch, too."""
    ranks = job(3)
    train(ranks, 4)
    for rank in ranks:
        odd = rank.rank == 2
        rank.call("broadcast" if odd and what == "operation" else "all_reduce", ended=False,
                  dtype="Half" if odd and what == "dtype" else "Float")  # fmt: skip
    write(ranks, tmp_path / "d")
    assert named(diagnose(tmp_path / "d")) == ("mismatch", [2])


def test_two_ranks_that_differ(tmp_path: Path) -> None:
    """Between two ranks the one that left its habit is named; without a habit nobody is."""
    for calls, expected in ((4, ("mismatch", [1])), (1, ("unknown", []))):
        ranks = job(2)
        train(ranks, calls)
        ranks[0].call(size=8, ended=False)
        ranks[1].call(size=7, ended=False)
        write(ranks, tmp_path / f"d{calls}")
        assert named(diagnose(tmp_path / f"d{calls}")) == expected


def test_a_majority_that_the_unseen_could_turn(tmp_path: Path) -> None:
    """Two against one is no majority where two more left no dump."""
    ranks = job(5)
    train(ranks, 1)
    for rank in ranks:
        rank.call(size=7 if rank.rank == 1 else 8, ended=False)
    write(ranks[:3], tmp_path / "d")
    assert named(diagnose(tmp_path / "d")) == ("unknown", [])


GROUPS = {"1": ("tp", (0, 1, 2)), "2": ("dp", (0, 1, 2))}


@pytest.mark.parametrize("blocking", [False, True])
def test_order_swapped_between_two_groups(tmp_path: Path, blocking: bool) -> None:
    """The rank that issued the calls of two groups in another order than the others is named, not those that wait."""
    ranks = job(3, groups=GROUPS)
    for rank in ranks:
        for _ in range(3):
            rank.call(group="1").call(group="2")
        first, second = ("2", "1") if rank.rank == 1 else ("1", "2")
        rank.call(group=first, ended=False, line=40)
        if not blocking:
            rank.call(group=second, ended=False, line=41)
    write(ranks, tmp_path / "d")
    verdict = diagnose(tmp_path / "d")
    assert named(verdict) == ("mismatch", [1])
    assert verdict["culprits"][0]["group"] == "dp#2"
    assert verdict["culprits"][0]["source"] == "train.py:40"


def test_order_swapped_between_two_ranks(tmp_path: Path) -> None:
    """With two ranks the one that kept its order before is not named."""
    ranks = job(2, groups={"1": ("tp", (0, 1)), "2": ("dp", (0, 1))})
    for rank in ranks:
        for _ in range(3):
            rank.call(group="1").call(group="2")
    ranks[0].call(group="2", ended=False)
    ranks[1].call(group="1", ended=False)
    write(ranks, tmp_path / "d")
    assert named(diagnose(tmp_path / "d")) == ("mismatch", [0])


def test_a_healthy_job(tmp_path: Path) -> None:
    """Nothing is unfinished and all issued as many: nobody is blamed, also where a size was free to differ."""
    ranks = job(3)
    train(ranks, 5)
    for rank in ranks:
        rank.call("all_to_all", size=rank.rank + 1).call("barrier")
    write(ranks, tmp_path / "d")
    verdict = diagnose(tmp_path / "d")
    assert named(verdict) == ("healthy", [])
    assert verdict["victims"] == []


def test_a_job_that_runs(tmp_path: Path) -> None:
    """A call that was issued a moment before the dump is no stall, whoever had not issued it yet."""
    ranks = job(3)
    train(ranks, 5)
    for rank in ranks[:2]:
        rank.call(ended=False)
    write(ranks, tmp_path / "d", taken=BEGIN + 50_000_000)
    assert named(diagnose(tmp_path / "d")) == ("unknown", [])


def test_dumps_of_different_moments(tmp_path: Path) -> None:
    """A dump that others prove to be older than theirs says nothing about what came later."""
    ranks = job(3)
    train(ranks, 5)
    for rank in ranks[:2]:
        rank.call().call().call(ended=False)
    write(ranks, tmp_path / "d")
    verdict = diagnose(tmp_path / "d")
    assert named(verdict) == ("unknown", [])
    assert "rank 2 is older" in verdict["summary"]
    early = job(2)
    train(early, 5)
    early[0].now = BEGIN + 60 * SECOND
    early[0].call(ended=False)
    early[0].write(tmp_path / "e_")
    early[1].write(tmp_path / "e_", taken=BEGIN + 10 * SECOND)
    assert named(diagnose_prefix(tmp_path / "e_")) == ("unknown", [])


def diagnose_prefix(prefix: Path) -> dict[str, Any]:
    (prefix.parent / "empty").mkdir(exist_ok=True)
    return diagnose(prefix.parent / "empty", [prefix])


def test_only_the_unfinished_were_written(tmp_path: Path) -> None:
    """With TORCH_INCLUDE_ONLY_ACTIVE a rank's own calls that ended are not in its dump: it did not issue none."""
    ranks = job(3)
    train(ranks, 5)
    for rank in ranks[:2]:
        rank.call(ended=False)
    for rank in ranks:
        rank.entries = [entry for entry in rank.entries if entry["state"] != "completed"]
    write(ranks, tmp_path / "d")
    assert named(diagnose(tmp_path / "d")) == ("unknown", [])


def test_a_ring_that_has_dropped_its_oldest(tmp_path: Path) -> None:
    """Entries that were overwritten are no calls left out; the newest tell enough."""
    ranks = job(3)
    train(ranks, 30)
    for rank in ranks[1:]:
        rank.call(ended=False)
    for rank in ranks:
        rank.entries = rank.entries[-10 - rank.rank :]
    write(ranks, tmp_path / "d")
    assert named(diagnose(tmp_path / "d")) == ("stalled", [0])


def test_a_call_that_only_few_issued(tmp_path: Path) -> None:
    """One rank that stands alone in a call may have issued one too many: nobody is named."""
    ranks = job(4)
    train(ranks, 5)
    ranks[0].call(ended=False)
    write(ranks, tmp_path / "d")
    assert named(diagnose(tmp_path / "d")) == ("unknown", [])


def test_a_broadcast_that_several_did_not_issue(tmp_path: Path) -> None:
    """Its root is not in a dump, so which of several the others wait for is not known."""
    ranks = job(5)
    train(ranks, 5)
    for rank in ranks[:3]:
        rank.call("broadcast", ended=False)
    write(ranks, tmp_path / "d")
    assert named(diagnose(tmp_path / "d")) == ("unknown", [])


def test_entries_that_nobody_looked_after(tmp_path: Path) -> None:
    """A call that is never marked as ended, with later ones of its group that are, is not under way."""
    ranks = job(3)
    for rank in ranks:
        rank.call(ended=False, marked=False).call().call()
    ranks[0].entries[0]["state"] = "completed"
    write(ranks, tmp_path / "d")
    assert named(diagnose(tmp_path / "d")) == ("healthy", [])


def test_a_call_that_all_issued(tmp_path: Path) -> None:
    """Where all have issued it alike and it does not end, no rank is lacking."""
    ranks = job(3)
    train(ranks, 5)
    for rank in ranks:
        rank.call(ended=False, timed_out=True)
    write(ranks, tmp_path / "d")
    verdict = diagnose(tmp_path / "d")
    assert named(verdict) == ("unknown", [])
    assert "no rank is lacking" in verdict["summary"]


def test_hosts_that_ran_ahead(tmp_path: Path) -> None:
    """All issued #6 and it does not end; that one rank's host issued fewer of the calls behind it is no fault."""
    ranks = job(3)
    train(ranks, 5)
    for rank in ranks:
        for _ in range(4 - rank.rank):
            rank.call(ended=False)
    write(ranks, tmp_path / "d")
    verdict = diagnose(tmp_path / "d")
    assert named(verdict) == ("unknown", [])
    assert "all ranks issued all_reduce #6 of default_pg" in verdict["summary"]


def test_waits_through_two_groups(tmp_path: Path) -> None:
    """A rank that stands in a call of another group passes the wait on; the rank at the end of the chain is named."""
    ranks = job(3, groups={"1": ("pair", (1, 2))})
    train(ranks, 5)
    ranks[0].call(ended=False)
    ranks[1].call(group="1", ended=False)
    write(ranks, tmp_path / "d")
    verdict = diagnose(tmp_path / "d")
    assert named(verdict) == ("stalled", [2])
    assert {victim["rank"]: victim["waits_for"] for victim in verdict["victims"]} == {0: [1, 2], 1: [2]}


def test_a_rank_that_stands_in_a_receive(tmp_path: Path) -> None:
    """It is not idle: what it waits for is followed; a message in a batch that ended does not count."""
    ranks = job(4)
    train(ranks, 5)
    for rank in ranks[1:]:
        rank.call(ended=False) if rank.rank != 2 else rank.call("recv 2<-3", p2p=True, ended=False)
    ranks[0].call(ended=False)
    write(ranks, tmp_path / "d")
    assert named(diagnose(tmp_path / "d")) == ("unknown", [])
    ranks = job(4)
    train(ranks, 5)
    ranks[2].call("recv 2<-3", p2p=True, ended=False, marked=False).call("coalesced", p2p=True)
    for rank in (0, 1, 3):
        ranks[rank].call(ended=False)
    write(ranks, tmp_path / "e")
    assert named(diagnose(tmp_path / "e")) == ("stalled", [2])


def test_gloo_says_retired(tmp_path: Path) -> None:
    """gloo's `state` says "scheduled" for ever and its groups lie under "": what is retired ended."""
    ranks = job(3, backend="gloo")
    train(ranks, 5)
    write(ranks, tmp_path / "ok")
    assert named(diagnose(tmp_path / "ok")) == ("healthy", [])
    for rank in ranks[:2]:
        rank.call(ended=False)
    write(ranks, tmp_path / "d")
    verdict = diagnose(tmp_path / "d")
    assert named(verdict) == ("stalled", [2])
    assert any("no send and no recv" in line for line in verdict["evidence"])


def test_gloo_does_not_hold_messages(tmp_path: Path) -> None:
    """That there were some shows in `op_id`: such dumps prove neither that all is well nor who stands still."""
    for folder, ended in (("ok", True), ("d", False)):
        ranks = job(3, backend="gloo")
        for rank in ranks:
            rank.unseen = 2
        train(ranks, 5)
        for rank in ranks[:2]:
            rank.call(ended=False) if not ended else None
        write(ranks, tmp_path / folder)
        verdict = diagnose(tmp_path / folder)
        assert named(verdict) == ("unknown", [])
        assert "messages" in " ".join([verdict["summary"], *verdict["evidence"]])


def test_dumps_without_a_call(tmp_path: Path) -> None:
    """They show nothing, not that all is well."""
    write(job(2), tmp_path / "d")
    assert named(diagnose(tmp_path / "d")) == ("unknown", [])


def test_gloo_retires_what_failed_too(tmp_path: Path) -> None:
    """After a timeout nothing is unfinished on gloo: the rank that lacks the call is told, and not blamed."""
    ranks = job(3, backend="gloo")
    train(ranks, 3)
    for rank in (ranks[0], ranks[2]):
        rank.call()
    write(ranks, tmp_path / "d")
    verdict = diagnose(tmp_path / "d")
    assert named(verdict) == ("unknown", [])
    assert (
        "rank 1 had not issued all_reduce #4 of default_pg (train.py:12), which ended or failed" in verdict["summary"]
    )


def test_batches(tmp_path: Path) -> None:
    """The parts of a batch ended when it did; a call before it, or a batch of the other kind, is left alone."""
    rank = Recorder(0, 2).call(ended=False)
    rank.call("send 0->1", p2p=True, ended=False, marked=False).call("recv 0<-1", p2p=True, ended=False, marked=False)
    rank.call("coalesced", p2p=True)
    dump = read_dump(rank.write(tmp_path / "d_"))
    assert [call.finished for call in dump.calls] == [False]
    assert [call.finished for call in dump.messages] == [True, True]
    rank = Recorder(0, 2).call("all_gather", ended=False, marked=False).call("coalesced").call(ended=False)
    assert [call.finished for call in read_dump(rank.write(tmp_path / "d_")).calls] == [True, False]


def test_groups_that_share_a_name(tmp_path: Path) -> None:
    """Two groups of one name, as a split of a group makes them, are two; one waits and the other has ended."""
    ranks = [Recorder(rank, 4, groups={"9": ("split", (0, 1) if rank < 2 else (2, 3))}) for rank in range(4)]
    for rank in ranks:
        rank.call(group="9", size=3 if rank.rank < 2 else 5).call(group="9", size=4 if rank.rank < 2 else 6)
    write(ranks, tmp_path / "d")
    assert named(diagnose(tmp_path / "d")) == ("healthy", [])
    ranks[0].call(group="9", ended=False)
    write(ranks, tmp_path / "d")
    assert named(diagnose(tmp_path / "d")) == ("stalled", [1])


# ---- beside shards


def stuck(run_dir: Path, shown: tuple[int, ...] = (0, 1, 2), world: int = 3) -> None:
    """Shards of a job of which rank 2 did not issue the last all_reduce; those not in ``shown`` left none."""
    ranks = shards.job(run_dir, world)
    shards.train(ranks)
    for rank in ranks:
        if rank.rank != 2:
            rank.forward("", "layer", "head").backward("AddBackward0").call().wait()
        rank.sleep(10).beat()
    launcher(run_dir, {"event": "worker_start", "rank": 0}, {"event": "stall", "at": 9.0})
    for rank in ranks:
        if rank.rank not in shown:
            for file in rank.writer.folder.iterdir():
                file.unlink()
            rank.writer.folder.rmdir()


def recorder(
    rank: int, calls: int = 3, *, stands: bool = False, size: int = 8, world: int = 3, backend: str = "nccl"
) -> Recorder:
    """A dump that fits to the shards: a call every 16 us, as `shards.train` has them."""
    groups = {"world": ("world", tuple(range(world)))}
    found = Recorder(rank, world, groups=groups, gap_ns=16_000, backend=backend)
    for _ in range(calls):
        found.call(group="world", size=size)
    if stands:
        found.call(group="world", size=size, ended=False)
    return found


def test_a_dump_in_place_of_a_shard(run_dir: Path) -> None:
    """The rank that left no shard, but a dump that lacks the call, is named; without the dump nobody is."""
    stuck(run_dir, shown=(0, 1))
    assert named(diagnose(run_dir)) == ("unknown", [])
    (run_dir / "flight-recorder").mkdir()
    recorder(2).write(run_dir / "flight-recorder" / "rank")
    verdict = diagnose(run_dir)
    assert named(verdict) == ("stalled", [2])
    assert verdict["culprits"][0]["collective"] == "all_reduce"
    assert verdict["culprits"][0]["step"] is None
    assert verdict["confidence"] < 0.7
    assert verdict["missing_ranks"] == [2]
    assert any("its Flight Recorder dump stands in for it" in line for line in verdict["evidence"])


def test_own_dumps_are_found_in_the_shards_folders(run_dir: Path) -> None:
    """The watchdog's flight-recorder.json is read where the shard beside it is gone."""
    stuck(run_dir, shown=(0, 1))
    folder = run_dir / schema.RANKS_FOLDER / "rank00002-attempt000-host-102"
    folder.mkdir()
    found = recorder(2)
    found.frames = False
    (folder / schema.FLIGHT_RECORDER_FILE).write_text(json.dumps(found.dump()))
    os.utime(folder / schema.FLIGHT_RECORDER_FILE, ns=(TAKEN, TAKEN))
    assert named(diagnose(run_dir)) == ("stalled", [2])


def test_a_dump_shows_that_the_unseen_rank_waits_too(run_dir: Path) -> None:
    """The rank without a shard issued the call as well: it is no culprit, and the one that did not is named."""
    stuck(run_dir, shown=(0, 2))
    recorder(1, stands=True).write(run_dir / "flight-recorder-")
    verdict = diagnose(run_dir)
    assert named(verdict) == ("stalled", [2])
    assert [victim["rank"] for victim in verdict["victims"]] == [0, 1]


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_a_job_that_sends_messages(run_dir: Path, backend: str) -> None:
    """gloo's dumps hold no messages, so a rank that stands in no collective may stand in one: nobody is named."""
    ranks = shards.job(run_dir, 3)
    shards.train(ranks)
    ranks[0].call("send", peer=1, tag=0)
    for rank in ranks[:2]:
        rank.call().wait().sleep(10).beat()
    launcher(run_dir, {"event": "stall", "at": 9.0})
    for file in ranks[2].writer.folder.iterdir():
        file.unlink()
    recorder(2, backend=backend).write(run_dir / "flight-recorder-")
    assert named(diagnose(run_dir)) == (("unknown", []) if backend == "gloo" else ("stalled", [2]))


def test_a_dump_whose_call_has_another_size(run_dir: Path) -> None:
    """A rank without a shard that issued another call than the others is a mismatch."""
    ranks = shards.job(run_dir, 4)
    shards.train(ranks)
    for rank in ranks:
        rank.call(size=8).wait().sleep(10).beat()
    launcher(run_dir, {"event": "stall", "at": 9.0})
    for file in ranks[3].writer.folder.iterdir():
        file.unlink()
    found = recorder(3, world=4)
    found.call(group="world", size=9, ended=False, line=77).write(run_dir / "flight-recorder-")
    verdict = diagnose(run_dir)
    assert named(verdict) == ("mismatch", [3])
    assert verdict["culprits"][0]["source"] == "train.py:77"


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter"])
def test_reduce_scatter_of_gloo(run_dir: Path, op: str) -> None:
    """A gloo dump shows it as an all_reduce: no difference to the shards, and what differs besides it is found."""
    ranks = shards.job(run_dir, 4)
    shards.train(ranks)
    for rank in ranks:
        rank.call("reduce_scatter", size=2).call(op, size=4).wait().sleep(10).beat()
    launcher(run_dir, {"event": "stall", "at": 9.0})
    for file in ranks[3].writer.folder.iterdir():
        file.unlink()
    found = recorder(3, world=4, backend="gloo").call("all_reduce", 8, group="world")
    found.call("all_reduce", 16, group="world", ended=False).write(run_dir / "flight-recorder-")
    assert named(diagnose(run_dir)) == (("mismatch", [3]) if op == "all_gather" else ("unknown", []))


def test_a_dump_that_does_not_line_up(run_dir: Path) -> None:
    """Where a dump counts otherwise than the shards it is not used, and that is said."""
    stuck(run_dir, shown=(0, 1))
    recorder(2, size=5).write(run_dir / "flight-recorder-")
    verdict = diagnose(run_dir)
    assert named(verdict) == ("unknown", [])
    assert any("do not line up" in line for line in verdict["evidence"])


@pytest.mark.parametrize("both", [False, True])
def test_a_dump_that_counts_from_another_start(run_dir: Path, both: bool) -> None:
    """Where recording began after some calls, equal numbers are other calls, and the dump is not used."""
    ranks = shards.job(run_dir, 3)
    shards.train(ranks, 12)
    for rank in ranks:
        rank.call().wait().sleep(10).beat()
    launcher(run_dir, {"event": "stall", "at": 9.0})
    for file in ranks[2].writer.folder.iterdir():
        file.unlink()
    for number in (0, 2) if both else (2,):
        found = recorder(number, 10)
        for entry in found.entries:  # of the same moments, two numbers less
            entry["time_created_ns"] += 2 * 16_000
        found.write(run_dir / "flight-recorder-")
    verdict = diagnose(run_dir)
    assert named(verdict) == ("unknown", [])
    assert any("do not line up" in line for line in verdict["evidence"])


def test_shard_and_dump_that_contradict_each_other(run_dir: Path) -> None:
    """The evidence says so and the confidence falls; the shard goes first."""
    stuck(run_dir)
    sure = diagnose(run_dir)
    recorder(0, stands=True).write(run_dir / "flight-recorder-")
    agreed = diagnose(run_dir)
    assert agreed["confidence"] == sure["confidence"]
    found = recorder(1, calls=2)
    found.call("broadcast", group="world").write(run_dir / "flight-recorder-")
    verdict = diagnose(run_dir)
    assert named(verdict) == named(sure) == ("stalled", [2])
    assert verdict["confidence"] < sure["confidence"]
    assert any("contradict each other" in line for line in verdict["evidence"])


def test_dumps_beside_a_healthy_run(run_dir: Path) -> None:
    """A run that ended well stays healthy with dumps beside it, whatever they hold."""
    ranks = shards.job(run_dir, 3)
    shards.train(ranks)
    for rank in ranks:
        rank.leave()
    for rank in range(3):
        recorder(rank, stands=rank == 0).write(run_dir / "flight-recorder-")
    assert named(diagnose(run_dir)) == ("healthy", [])


def test_a_dump_of_a_stall_that_recovered(run_dir: Path) -> None:
    """Dumps of ranks without shards that were taken long before the end blame nobody in a run that ended well."""
    ranks = shards.job(run_dir, 4)
    shards.train(ranks, 8)
    for rank in ranks:
        rank.leave()
    launcher(
        run_dir,
        *({"event": "worker_start", "rank": rank} for rank in range(4)),
        *({"event": "worker_exit", "at": 1.0, "rank": r, "attempt": 0, "exit_code": 0, "order": r} for r in range(4)),
    )
    for number, stands in ((2, False), (3, True)):
        for file in ranks[number].writer.folder.iterdir():
            file.unlink()
        recorder(number, stands=stands, world=4).write(run_dir / "flight-recorder-")
    verdict = diagnose(run_dir)
    assert verdict["kind"] in ("healthy", "unknown")
    assert any("the job went on after its Flight Recorder dump" in line for line in verdict["evidence"])


def test_a_stopped_recording(run_dir: Path) -> None:
    """A shard that stopped says nothing of later calls: the dump shows that the rank waits like the others."""
    ranks = shards.job(run_dir, 3)
    shards.train(ranks)
    ranks[0].event(K.STOP)
    ranks[0].writer.write_meta({"stopped": "recording stopped at step 3: no space left on the disk"})
    ranks[1].call().wait().sleep(10).beat()
    ranks[2].forward("layer").sleep(10).beat()
    launcher(run_dir, {"event": "stall", "at": 9.0})
    recorder(0, stands=True).write(run_dir / "flight-recorder-")
    assert named(diagnose(run_dir)) == ("stalled", [2])


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`distdbg diagnose` takes a folder of dumps, and --flight-recorder more than once."""
    ranks = job(3)
    train(ranks, 4)
    for rank in ranks[:2]:
        rank.call(ended=False)
    write(ranks, tmp_path / "d")
    assert main([str(tmp_path / "d"), "--lanes"]) == 0
    out = capsys.readouterr().out
    assert "rank 2 is the one that the others wait for" in out
    assert "None" not in out
    (tmp_path / "run").mkdir()
    files = [str(file) for file in files_at(tmp_path / "d")]
    options = [word for file in files for word in ("--flight-recorder", file)]
    assert main([str(tmp_path / "run"), *options, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["culprits"][0]["rank"] == 2
    with pytest.raises(DistdbgError, match="no Flight Recorder dump there"):
        main([str(tmp_path / "run"), "--flight-recorder", str(tmp_path / "gone")])
