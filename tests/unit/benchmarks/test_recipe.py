"""The benchmark of settings by stage: which rate an arm is compared at."""

from experiments.benchmarks.recipe import best_rate


def row(arm, lr, turn, accuracy, workload="cifar100"):
    values = (arm, workload, lr, turn, accuracy)
    return dict(zip(("arm", "workload", "lr", "turn", "accuracy"), map(str, values), strict=True))


def test_the_first_seed_decides_each_arms_rate_on_each_data_set():
    rows = [row("a", 0.2, 0, 0.41), row("a", 0.4, 0, 0.43), row("b", 0.4, 0, 0.2)]
    rows += [row("a", 0.2, 1, 0.99), row("a", 0.2, 0, 0.6, "imagenette")]
    assert best_rate(rows, "cifar100", "a") == 0.4
    assert best_rate(rows, "imagenette", "a") == 0.2
    assert best_rate(rows, "imagenette", "b") is None  # not run there
