"""What must hold of every run."""

from __future__ import annotations

from hypothesis import reject

from experiments.benchmarks.coverage.cases import Case
from experiments.benchmarks.coverage.player import NoSuchRunError, Played, play


def check_drawn(case: Case) -> Played:
    """Check a case that hypothesis drew; it draws another one for a case that cannot begin."""
    try:
        return check(case)
    except NoSuchRunError:
        reject()


def check(case: Case) -> Played:
    """Play a case and assert what must hold of it.

    Raises:
        NoSuchRunError: If it cannot begin.
    """
    played = play(case)
    assert played.twice == 0, f"{played.twice} samples trained on twice"
    if case.options["sync"] == "ssp":
        assert played.ahead <= case.options["staleness"]
    if played.ended:
        return played
    if case.options["push"] != "weights":
        assert abs(played.pushed - played.trained) < 0.01  # sums of float32
    left = played.expected - played.trained
    assert left == played.lost, f"{left} samples left out, {played.lost} counted"
    assert played.whole, "samples missed in an epoch that nobody had begun"
    assert played.epochs == list(range(case.options["epochs"]))
    return played
