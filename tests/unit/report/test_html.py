"""The report: self-contained, escaped, with every picture that the run has something for."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from benchmarks.synthetic import write_run
from distdbg.analyze.facts import gather
from distdbg.analyze.read import read_run
from distdbg.analyze.verdict import diagnose_run
from distdbg.cli import main
from distdbg.report.html import render, svg
from distdbg.schema import EventKind as K
from tests.unit.shards import Rank, job, launcher, train

HOSTILE = "<script>alert(1)</script>", '"\' onload=alert(2) x="', "</title></style></svg><img src=x onerror=alert(3)>"
_VOID = {"meta", "br", "img", "link", "input"}


class Page(HTMLParser):
    """What a page holds: elements, attributes, text; checks that elements close in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self._stack: list[str] = []
        self.feed(text)
        self.close()
        assert not self._stack, f"never closed: {self._stack}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in _VOID:
            self._stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self._stack, f"</{tag}> closes nothing"
        assert self._stack.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.texts)


def report(run_dir: Path) -> str:
    run = read_run(run_dir)
    return render(gather(run), diagnose_run(run))


def stalled(run_dir: Path, node: str = "MulBackward0", module: str = "net.gate", world: int = 4) -> list[Rank]:
    """A job in which rank 2 stands in a node and the others wait for it."""
    ranks = job(run_dir, world)
    train(ranks, steps=4)
    for rank in ranks:
        rank.forward("", module)
        if rank.rank == 2:
            rank.backward(node, module=module, leave=False)
        else:
            rank.event(K.BACKWARD_BEGIN, seq=4, a=1).call(issuer="DDP").event(K.BACKWARD_FINAL, seq=4)
        rank.sleep(12).beat()
    launcher(run_dir, {"event": "stall", "at": 12.0})
    return ranks


def sections(page: Page) -> set[str]:
    return {value for name, value in page.attributes if name == "id"} - {"content", "head"}


def test_a_stall(run_dir: Path) -> None:
    """The sentence, the node in red, the graph of waits, the tree with positions, the ends of the ranks."""
    stalled(run_dir)
    page = Page(report(run_dir))
    assert {"lanes", "waits", "model", "evidence", "ranks"} <= sections(page)
    assert "rank 2 stands still in backward of step 4 (node MulBackward0" in page.text
    assert ("class", "stands") in page.attributes
    assert ("class", "box bad") in page.attributes
    assert "ranks 0, 1 and 3 wait for rank 2" in page.text


def test_an_exception(run_dir: Path) -> None:
    """What the exception left is red, and its lane says in which node it raised."""
    ranks = job(run_dir, 2)
    train(ranks)
    ranks[0].event(K.BACKWARD_BEGIN, seq=3, a=1).call(issuer="DDP").event(K.BACKWARD_FINAL, seq=3)
    ranks[1].backward("AddBackward0", "ExpBackward0", module="net.act", leave=False)
    error = ranks[1].writer.intern("error", "ValueError: bad", {"type": "ValueError", "where": "train.py:1 in f"})
    ranks[1].event(K.BACKWARD_RAISED, name=error, seq=3).event(K.EXCEPTION, name=error).event(K.EXIT, seq=1)
    page = Page(report(run_dir))
    assert "raised in ExpBackward0" in page.text
    assert ("class", "stands") in page.attributes


def test_a_deadlock_has_arrows_both_ways(run_dir: Path) -> None:
    """Two ranks that wait for each other: an arrow from each to the other."""
    ranks = job(run_dir, 2)
    for rank in ranks:
        for _ in range(3):
            rank.call("send" if rank.rank == 0 else "recv", peer=1 - rank.rank, tag=0).step()
        rank.call("recv", peer=1 - rank.rank, tag=0).wait().sleep(10).beat()
    launcher(run_dir, {"event": "stall", "at": 10.0})
    assert Page(report(run_dir)).attributes.count(("class", "arrow")) == 2


def test_nothing_is_fetched_and_nothing_runs(run_dir: Path) -> None:
    """No script, no link to anything outside, and a policy that would forbid them."""
    stalled(run_dir)
    text = report(run_dir)
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "object", "embed"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on") or name in ("src", "style", "xlink:href")]
    assert all(value.startswith("#") for name, value in page.attributes if name == "href")
    assert not re.search(r"https?://|@import|url\((?!#)", text)
    assert "default-src 'none'" in text


@pytest.mark.parametrize("name", HOSTILE)
def test_names_are_escaped(run_dir: Path, name: str) -> None:
    """Markup in names of modules, nodes, operations and exceptions is shown as it is, and is no markup."""
    ranks = stalled(run_dir, node=name, module=f"net.{name}".replace("..", "."))
    ranks[0].raised(name, kind=name)
    ranks[1].call(name, source=name, group=name)
    text = report(run_dir)
    page = Page(text)
    assert not {"script", "img"} & set(page.tags)
    assert not [key for key, _ in page.attributes if key.startswith("on")]
    assert name in page.text


def test_control_characters_and_directions_are_replaced() -> None:
    """Characters that would make a name read as another one are shown as replaced."""
    assert svg.text("a\x00b\u202ec") == "a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}c"
    assert svg.text("<&\"'>") == "&lt;&amp;&quot;&#x27;&gt;"
    assert len(svg.text("x" * 10_000)) < 2_100


def test_a_straggler_among_many(tmp_path: Path) -> None:
    """64 ranks: the heat map comes first, the late rank's cell is red, and the page stays small."""
    write_run(tmp_path / "run", ranks=64, steps=16, straggler=40, at_step=5, delay_ms=12)
    text = report(tmp_path / "run")
    page = Page(text)
    assert {"heat", "lanes", "steps"} <= sections(page)
    assert text.index('id="heat"') < text.index('id="lanes"')
    assert re.search(r"rank 40, blocks\.3\.mlp: 1\d\.\d+ ms a step, median 4\.\d+ ms", page.text)
    assert ("class", "late") in page.attributes
    assert len(text) < 1_000_000


def test_a_healthy_run_and_one_that_never_began(run_dir: Path) -> None:
    """A report is written where there is little to show, too."""
    ranks = job(run_dir, 2)
    page = Page(report(run_dir))
    assert "heat" not in sections(page)
    train(ranks)
    for rank in ranks:
        rank.leave()
    assert "nothing wrong: 2 ranks, 3 steps" in Page(report(run_dir)).text


def test_keyboard_and_colours(run_dir: Path) -> None:
    """Boxes that scroll take the focus and have a name, pictures say what they show, dark is a scheme of its own."""
    stalled(run_dir)
    text = report(run_dir)
    for box in re.findall(r'<div class="scroll[^>]*>', text):
        assert 'tabindex="0"' in box
        assert 'aria-label="' in box
    pictures = re.findall(r"<svg[^>]*>", text)
    assert all("aria-label" in picture or "aria-hidden" in picture for picture in pictures)
    assert "prefers-color-scheme: dark" in text


def test_the_command(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`report` writes the file and tells its size; a folder that can't be written is told in words."""
    stalled(run_dir)
    output = tmp_path / "out.html"
    assert main(["report", str(run_dir), "-o", str(output)]) == 0
    assert re.search(r"\d+ kB in \d+\.\d s: .*out\.html", capsys.readouterr().out)
    assert output.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert main(["report", str(run_dir), "-o", str(tmp_path / "no" / "x.html")]) == 2
    assert "give another place with -o" in capsys.readouterr().err
