import pytest

from dbsl.plan.solve import PlanRules, TimeModel, plan_dual_batch, plan_steps
from dbsl.plan.stages import make_stages
from dbsl.plan.text import comparison, format_run, nodes_in_words


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ((0, 0, 0, 1), "2 nodes (3 + 1)"),
        ((0, 0, 1, 1, 2, 2), "3 nodes (2 each)"),
        ((0,), "1 node (1 each)"),
        ((*range(40), 39), "40 nodes (1 + 1 + 1 + 1 + … + 1 + 1 + 2)"),
    ],
)
def test_nodes_are_told_by_the_processes_of_each(nodes, words):
    assert nodes_in_words(nodes) == words


def test_the_plan_of_one_worker_speaks_of_no_others():
    plan = plan_dual_batch(1000, 1, 0, 100, TimeModel(1e-3, 0.02))
    text = format_run(make_stages(2, [24]), {24: plan}, 1)
    assert text.splitlines() == [
        "24 px, epochs 1-2, lr 0.1",
        "   worker   batch   samples   steps      time",
        "        0     100      1000      10     1.2 s",
        "  1.2 s an epoch of 10 steps",
        "",
        "predicted for all 2 epochs, without evaluation: 2.4 s",
    ]


@pytest.mark.parametrize(
    ("samples", "drop_last", "words"),
    [
        (1437, False, "23 joint steps, 62 or 63 samples each;"),
        (1437, True, "22 joint steps, 64 samples each;"),
        (1280, False, "20 joint steps, 64 samples each;"),
    ],
)
def test_a_plan_of_joint_steps_tells_the_samples_that_its_steps_have(samples, drop_last, words):
    models, rules = [TimeModel(1e-3, 0.02)] * 2, PlanRules(drop_last=drop_last)
    plan = plan_steps(samples, (16, 48), models, rules)
    assert words in comparison(plan)
