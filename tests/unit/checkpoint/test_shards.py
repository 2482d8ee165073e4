"""What a process takes from a checkpoint where workers go by themselves, at clocks of their own."""

from dataclasses import asdict
from types import SimpleNamespace as Bag

import numpy as np
import pytest

from dbsl.checkpoint.handover import (
    Saved,
    check_epochs_under_way,
    for_others,
    with_lost_workers,
    without_workers,
)
from dbsl.plan.batches import TurnSampler
from dbsl.plan.follow import Planner
from dbsl.plan.members import EpochPlans, Members
from dbsl.plan.solve import PlanRules, plan_dual_batch, plan_steps
from dbsl.plan.types import TimeModel
from train import Config

FAST = TimeModel(0.001, 0.01)
# What a server has told of and has not merged.
NOTHING = {"inside": [], "reports": [], "outer": None}
COUNTS = {"weights": None, "version": 9, "refused": 0}


def dual(workers, rounds=1):
    return plan_dual_batch(60, workers, 1, 4, FAST, PlanRules(time_ratio=1.05, rounds=rounds))


def state_of(clocks, plan=None, *, rounds=1, active=None, **server):
    """Return the state that rank 0 saved of a run with a server; its own clock stands still."""
    active = list(range(len(clocks))) if active is None else active
    plans = EpochPlans({8: plan or dual(len(clocks))}, lambda epoch: 8)
    server = NOTHING | COUNTS | {"clocks": clocks, "active": active} | server
    cluster = {"clock": 0, "refused": 0, "time_s": None, "waited_s": 0.5, "untold": []}
    return {
        "cluster": cluster | {"server": server},
        "planner": plans.state_dict() | {"rounds": rounds},
        "model": {"weights": None},
        "stepper": {"optimizers": {0: "own"}},
        "progress": {"steps": 4},
        "timer": {0: 0.3},
        "meter": {"heard": {0: 20}},
        "log": None,
    }


def run_of(config, rounds=1, **more):
    """Return as much of a new run of 60 samples as a restart asks for."""
    data, stage_at = Bag(train=range(60)), lambda epoch: Bag(resolution=8)
    sampler = TurnSampler(config, 60, rounds, 1)
    how = {"planner": Bag(state_dict=dict), "first": {8: dual(2, rounds)}} | more
    plans = Bag(rounds=rounds, stage_at=stage_at, sampler=sampler, **how)
    cluster = Bag(workers=(1,), state_dict=lambda: {"server": {"version": 0}})
    own = {"cluster": cluster, "optimizers": {1: "new"}, "stepper": Bag(state_dict=dict)}
    return Bag(config=config, data=data, plans=plans, **own)


def saved_as(state, config, run=None, *, at_epoch_end=False, **before):
    """Return a run of 60 samples that was saved with these settings."""
    settings, run = asdict(config) | before, run or run_of(config)
    return Saved(state, settings, 60, run, at_epoch_end=at_epoch_end)


@pytest.mark.parametrize(
    ("clocks", "epochs", "back"),
    [
        ([10, 10, 3], 8, 5),  # of 5 epochs of 2 rounds all are over: nobody has begun the sixth
        ([10, 9, 3], 8, 5),
        ([7, 6, 3], 8, 4),  # a leader in its fourth epoch's last round
        ([8, 6, 3], 8, 4),  # the fifth, if it has begun it, begins again
        ([8, 6, 3], 4, 4),  # as far as there are epochs
    ],
)
def test_a_lost_worker_is_back_in_the_first_epoch_that_nobody_has_begun(clocks, epochs, back):
    members = Members(3, 2)
    planner = Planner({8: dual(3, 2)}, lambda epoch: 8, {8: [FAST] * 3}, members=members)
    run = Bag(config=Bag(epochs=epochs), plans=Bag(rounds=2, planner=planner))
    saved = state_of(clocks, active=[0, 1]) | {"planner": planner.state_dict()}
    state = with_lost_workers(saved, run, 5)
    assert state["cluster"]["server"]["clocks"] == [*clocks[:2], 2 * back]
    assert set(state["planner"]["decided"]) == set(range(min(clocks[:2]) // 2, back))
    assert state["cluster"]["server"]["active"] == [0, 1, 2]


@pytest.mark.parametrize(
    ("sync", "clocks", "at_epoch_end", "cluster", "expected"),
    [
        ("bsp", [2, 2], True, {}, []),
        ("bsp", [2, 2], False, {}, [1]),  # stopped, and rank 0 may have no worker
        ("bsp", [2, 1], False, {"queue": []}, [0]),  # the first waits for the second
        ("bsp", [3, 3], True, {"queue": []}, [1]),
        ("asp", [3, 2], True, {"queue": []}, [1]),
        ("asp", [2, 1], True, {}, [0]),  # what the first has begun of the next, it begins again
        ("ssp", [3, 1], False, {}, [0, 1]),
        ("asp", [6, 6], True, {}, []),  # the run is over
        ("asp", [6, 4], False, {}, [2]),
    ],
)
def test_epochs_under_way_are_those_that_a_worker_may_have_begun(
    sync, clocks, at_epoch_end, cluster, expected
):
    state = state_of(clocks, rounds=2, inside=[1])
    state["cluster"] |= cluster  # with a queue it is simulated: it is known who is in a round
    saved = saved_as(state, Config(epochs=3), sync=sync, at_epoch_end=at_epoch_end)
    assert list(saved.under_way) == expected


def test_an_epoch_whose_plan_is_decided_is_under_way():
    state = state_of([3, 3], rounds=3)
    state["planner"]["epochs"] = {2: []}
    saved = saved_as(state, Config(epochs=3), at_epoch_end=True)
    assert list(saved.under_way) == [1, 2]


@pytest.mark.parametrize(
    ("sync", "clocks", "more", "expected"),
    [
        ("bsp", [5, 5, 5], {}, True),
        ("bsp", [5, 6, 5], {}, False),
        ("asp", [4, 4, 4], {}, True),
        ("asp", [5, 5, 5], {}, True),
        ("ssp", [4, 6, 4], {}, False),
        ("asp", [4, 4, 1], {"active": [0, 1]}, True),  # the third was lost
        ("asp", [4, 4, 5], {"active": [0, 1], "begun": 5}, False),  # when it was ahead
        ("asp", [4, 4, 4], {"untold": ["an end that nobody was told of"]}, False),
        ("step", [4, 4, 4], {"untold": ["an end that nobody was told of"]}, False),
        ("step", [5, 6, 5], {}, True),
    ],
)
def test_others_go_on_where_all_workers_have_pushed_the_same_rounds(sync, clocks, more, expected):
    begun, untold = more.pop("begun", 0), more.pop("untold", [])
    state = state_of(clocks, dual(3, rounds=2), rounds=2, **more)
    state["cluster"]["untold"] = untold
    state["planner"]["begun"] = begun
    saved = saved_as(state, Config(), sync=sync)
    assert saved.others_may_go_on == expected


@pytest.mark.parametrize("clock", [4, 5])
def test_others_go_on_with_what_the_rounds_of_an_epoch_have_left(clock):
    plan = dual(3, rounds=2)
    config = Config(seed=3, workers=2, sync="asp", rounds_per_epoch=2)
    run = run_of(config, rounds=2)
    state = state_of([clock] * 3, plan, rounds=2)
    start = for_others(saved_as(state, config, run, workers=3), run)
    sampler = run.plans.sampler.sampler(plan)
    taken = sum(len(sampler.indices(w, 2, 0)) for w in range(3))
    assert start["cluster"]["clock"] == clock
    assert start["cluster"]["server"]["clocks"] == [clock] * 2
    rest = [
        plan["taken"] for plans in start["planner"].get("epochs", {}).values() for plan in plans
    ]
    assert rest == [taken] * (clock == 5)


SIX_STEPS = plan_steps(60, np.array([5, 5]), [FAST] * 2)


@pytest.mark.parametrize(("clock", "expected"), [(3, 2), (6, 4), (4, None)])
def test_pushes_of_more_batches_begin_where_an_epoch_does(clock, expected):
    """There are three pushes, and then two."""
    config = Config(workers=2, push="gradients:3")
    run = run_of(config, rounds=2, first={8: SIX_STEPS})
    state = state_of([clock] * 2, SIX_STEPS, rounds=3, optimizer={})
    state["stages"] = [{"first_epoch": 0, "end_epoch": 9, "resolution": 8}]
    saved = saved_as(state, config, run, push="gradients:2")
    if expected is None:
        with pytest.raises(ValueError, match="push must stay gradients:2 inside an epoch, got"):
            check_epochs_under_way(saved, (), run, range(1, 2), others=True)
    else:
        assert for_others(saved, run)["cluster"]["clock"] == expected


@pytest.mark.parametrize(
    ("before", "expected"),
    [({"sync": "step"}, "own"), ({"push": "gradients"}, "of all"), ({}, None)],
)
def test_an_optimizer_goes_on_where_all_workers_shared_it(before, expected):
    shared = {"optimizer": "of all"} if "push" in before else {}
    state = state_of([1, 1], SIX_STEPS if before else None, **shared)
    state["cluster"] |= {"clock": 1}
    state["progress"] = None
    if "sync" in before:
        state["cluster"]["server"] = None
    config = Config(workers=2)
    found = for_others(saved_as(state, config, **before), run_of(config))
    assert found["cluster"]["server"].get("optimizer") == expected
    assert found["stepper"]["optimizers"] == ({1: expected} if expected else {})


def test_workers_count_on_from_what_they_pushed_and_new_ones_from_the_furthest():
    config = Config(workers=2)
    state = state_of([2, 2]) | {"progress": {"steps": 4, "inherited": 0, "learning_rate": 0.1}}
    meter = without_workers(state, run_of(config), steps=4)["meter"]
    assert meter["heard"] == {0: 20, 1: 20}
    assert meter["windows"] == {1: {"steps": 24}}  # in the round that is under way
