"""Workers of several processes: who is whose, how fast they are together, and what they report."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbsl.config.settings import RunConfig
from dbsl.plan.islands import Islands, split_inside
from dbsl.plan.types import BAD_LOSS, BAD_WEIGHTS, RoundReport, StepLine, TimeModel, join_reports
from dbsl.run.plans import count_workers, settle_islands

TWO_EACH = {"worker_processes": (2,)}


def settled(processes, nodes=(), **settings):
    config = RunConfig(resolutions=(8,), **settings)
    config = settle_islands(config, processes, nodes or (0,) * processes)
    return Islands.of(count_workers(config, processes)).sizes


def test_processes_go_to_workers_by_one_number_by_a_list_or_by_their_machine():
    assert settled(6, worker_processes=(2,)) == (2, 2, 2)
    assert settled(6, worker_processes=(6,)) == (6,)
    assert settled(6, worker_processes=(3, 1, 2)) == (3, 1, 2)
    assert settled(5, (0, 0, 0, 1, 1), worker_processes="node") == (3, 2)
    assert settled(5, (0, 0, 0, 1, 1), worker_processes="node", dedicated_server=True) == (2, 2)
    assert settled(3, worker_processes=(1,)) == settled(3) == (1, 1, 1)
    assert settled(1, worker_processes=(2,), workers=3) == (2, 2, 2)
    assert settled(1, worker_processes=(1, 1)) == (1, 1)


@pytest.mark.parametrize(
    ("processes", "settings", "message"),
    [
        (6, {"worker_processes": (4,)}, "must add up to the 6 processes, got 4"),
        (6, {"worker_processes": (4, 1)}, "must add up to the 6 processes, got 4,1"),
        (
            5,
            {"worker_processes": (2, 3), "dedicated_server": True},
            "must add up to the 4 processes less the dedicated server, got 2,3",
        ),
        (4, TWO_EACH | {"workers": 4}, "workers must equal those of worker_proc"),
        (4, TWO_EACH | {"sync": "step"}, "sync must be bsp with several .* a worker, got step"),
        (4, TWO_EACH | {"sync": "asp"}, "sync must be bsp with several .* a worker, got asp"),
        (4, TWO_EACH | {"push": "gradients"}, "push must be weights with several"),
        (4, TWO_EACH | {"large_batch_size": "auto"}, "size must not be auto with se"),
        (1, {"worker_processes": (1, 1), "workers": 3}, "workers must equal those of worker_pro"),
        (1, {"worker_processes": "node"}, "must be numbers in one process, got node"),
    ],
)
def test_what_is_not_there_for_workers_of_several_processes_is_refused(
    processes, settings, message
):
    with pytest.raises(ValueError, match=message):
        settled(processes, **settings)


@given(
    st.lists(st.tuples(st.floats(1e-4, 1e-2), st.floats(0, 1e-2)), min_size=1, max_size=6),
    st.integers(1, 3),
    st.integers(1, 300),
)
def test_a_workers_time_is_that_of_its_processes_which_end_a_step_together(models, least, batch):
    model = TimeModel.of([TimeModel(*one) for one in models], len(models))
    parts = split_inside(batch, model, least)
    assert sum(parts) == batch
    assert batch < least or all(part == 0 or part >= least for part in parts)
    if batch < least * len(parts):
        return
    taken = [a * n + b for (a, b), n in zip(models, parts, strict=True)]
    joined = Islands((len(models),)).join(model)
    if min(parts) > least:  # none is too slow to take its share; each is within a sample of it
        assert max(taken) == pytest.approx(float(joined.time(batch)[0]), abs=max(model.slope))


def report(worker, samples, loss, **more):
    lines = (StepLine(worker, 0, 0, 4, 0.5, loss, 0.1, 2.0, 100.0 * samples, 1.0, {"a": loss}),)
    values = {"lines": lines, "figures": {"a": loss}, "predicted_time_s": 1.0, **more}
    return RoundReport(worker, 0, 0, 8, 16, samples, 4, 1.0, loss, 0.5, **values)


def test_reports_of_a_workers_processes_are_one():
    nothing = report(1, 0, 0.0)
    first, second, alone = report(0, 3, 1.0), report(0, 1, 5.0, wait_time_s=2.0), report(2, 2, 7.0)
    joined, other, last = join_reports([first, second, report(1, 2, 3.0), nothing, alone])
    assert (joined.samples, joined.loss, joined.figures) == (4, 2.0, {"a": 2.0})
    assert (joined.wait_time_s, joined.predicted_time_s, joined.steps) == (0.0, 2.0, 4)
    assert [(line.loss, line.images_per_s) for line in joined.lines] == [(2.0, 400.0)]
    assert (other.loss, other.samples) == (3.0, 2)  # a process without a sample adds nothing
    assert last is alone


def test_a_worker_is_refused_for_each_of_its_processes_and_a_loss_says_most():
    bad = {"refused": True, "fault": BAD_WEIGHTS + 3}
    first, loss = report(0, 3, 1.0, **bad), report(0, 1, 5.0, refused=True, fault=BAD_LOSS)
    (joined,) = join_reports([first, loss])
    assert (joined.refused, joined.fault) == (True, BAD_LOSS)
    (joined,) = join_reports([report(0, 3, 1.0), first])
    assert (joined.refused, joined.fault) == (True, BAD_WEIGHTS + 3)
