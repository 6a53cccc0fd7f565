"""When silence is a stall: the policy, with times that the test makes up."""

from distdbg.pace import FIRST_STEP_S, FLOOR_S, Pace, RankPace


def ranks(*last: float, **about: object) -> dict[int, RankPace]:
    return {number: RankPace(t, step=3, **about) for number, t in enumerate(last)}  # type: ignore[arg-type]


def test_one_rank_that_moves_is_no_stall() -> None:
    """As long as one moves the others may well wait for it."""
    pace = Pace(timeout=8)
    assert pace.stalled(ranks(0, 0, 95, called=True), 100) is None
    assert pace.stalled(ranks(0, 0, 91, called=True), 100) == 9


def test_nothing_moves() -> None:
    """Silence on all ranks for the timeout is a stall; one that has ended does not count."""
    pace = Pace(timeout=8)
    found = ranks(50, 60, called=True)
    assert pace.stalled(found, 67) is None
    assert pace.stalled(found, 69) == 9
    found[1].exited = True
    assert pace.stalled(found, 59) == 9
    found[0].exited = True
    assert pace.stalled(found, 1000) is None


def test_visible_work_gets_more_time() -> None:
    """A checkpoint that is being written, or the script's own busy code, is silent for longer before it counts."""
    pace = Pace(timeout=8)
    found = ranks(0, 0, called=True)
    found[1] = RankPace(0, step=3, phase="checkpoint", busy=True)
    assert pace.stalled(found, 20) is None
    assert pace.stalled(found, 25) == 25
    found[1] = RankPace(0, step=3, phase="backward", busy=True)
    assert pace.stalled(found, 9) == 9


def test_idle_alike_gets_more_time() -> None:
    """Ranks that all sit in the script's own code after the same calls wait for nobody."""
    pace = Pace(timeout=8)
    found = ranks(0, 0, counts=(5, 3))
    assert pace.stalled(found, 20) is None
    assert pace.stalled(found, 25) == 25
    found[1].counts = (6, 3)
    assert pace.stalled(found, 9) == 9


def test_the_timeout_follows_the_pace() -> None:
    """Without a timeout: long before the first step has ended, then a multiple of what was seen, never too short."""
    pace = Pace()
    fresh = {0: RankPace(0, step=-1)}
    assert pace.limit(fresh) == FIRST_STEP_S
    assert pace.limit(ranks(0)) == FLOOR_S
    pace.saw_step(0)
    pace.saw_progress(0, 10, 15)
    assert pace.limit(ranks(0)) == 50
    pace.saw_step(30)
    assert pace.limit(ranks(0)) == 150
    pace.saw_step(3000)
    assert pace.limit(ranks(0)) == 600


def test_one_rank_that_moves_alone() -> None:
    """A rank that moves and issues nothing, while all others are silent for three timeouts, is worth a question."""
    pace = Pace(timeout=8)
    found = ranks(0, 0)
    found[1].last_progress = 29
    assert pace.circling(found, 23) is None
    assert pace.circling(found, 30) == 1
    found[1].counts_t = 20
    assert pace.circling(found, 30) is None
    found[1].counts_t, found[1].called = 0, True
    assert pace.circling(found, 30) is None
    found[1].called, found[0].exited = False, True
    assert pace.circling(found, 30) is None
