"""Workers come and go: the server's clocks and the planner's shares change together."""

from __future__ import annotations

from typing import NamedTuple

from dbsl.base.errors import SettingError
from dbsl.cluster.server import Server
from dbsl.plan.follow import Planner
from dbsl.plan.members import Members


class Change(NamedTuple):
    """A simulated worker that is lost, or that joins."""

    time_s: float  # virtual
    worker: int
    joins: bool


def members_of(server: Server, last: int) -> Members:
    """Return the server's workers as they are now; `last`: rounds of the run."""
    clocks = dict(enumerate(server.clocks))
    return Members(clocks, set(server.active), last, dict(server.inside), set(server.newcomers))


def lose_worker(server: Server, planner: Planner, worker: int, last: int) -> int:
    """Go on without a worker; return the samples that nobody trains on because of it.

    Raises:
        SettingError: If there is no plan without it; the run cannot go on.
    """
    members = members_of(server, last)
    server.drop(worker)
    return planner.drop(worker, members)


def join_worker(server: Server, planner: Planner, worker: int, last: int) -> int:
    """Go on with one more worker; return the rounds that it has behind it.

    At `last` the run has nothing left for it, and all is as it was.

    Raises:
        SettingError: If there is no plan with it; then all is as it was.
    """
    clock = planner.join(worker, members_of(server, last))
    if clock < last:
        server.join(worker, clock)
    return clock


def leave_out(server: Server, planner: Planner, workers: tuple[int, ...]) -> None:
    """Begin a run without workers that may join later.

    Raises:
        SettingError: If there is no plan without them, or nobody is left.
    """
    left = server.active - set(workers)
    if not left:
        raise SettingError("a run must begin with a worker, got none")
    planner.leave_out(workers)
    server.active = left
