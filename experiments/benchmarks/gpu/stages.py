"""The stages, in the order of what they are worth."""

from __future__ import annotations

from typing import Any

from experiments.benchmarks.gpu.runner import Stage
from experiments.benchmarks.gpu.runs import MODES
from experiments.benchmarks.gpu.training import HELD_OUT, RATES, TUNED_ON_SEED

SHORT = 35  # epochs of the first round of arms, a quarter of the published number
SEEDS = (0, 1, 2)
# What is compared, in the setting of the hybrid scheme and in that of the conference paper.
ARMS = {
    "all_large": "configs/cifar100/all_large.yaml",
    "dual": "configs/cifar100/dual_3_k105.yaml",
    "ddp512": "configs/cifar100/ddp_512.yaml",
    "hybrid": "configs/cifar100/hybrid_3.yaml",
}
CONFERENCE = {
    "all_large": "configs/cifar100_conference/all_large.yaml",
    "dual": "configs/cifar100_conference/dual_3_k105.yaml",
}
BEST = {
    "best": "configs/cifar100_best.yaml",
    "control": "configs/cifar100_conventional.yaml",
}


def all_stages() -> list[Stage]:
    """Return every stage; `Stage.dry` says which are in a dry run.

    The order is that of their worth: ten minutes are enough for the first ten.
    """
    first = _speed()
    modes, processes, resumed = _modes(), _processes(), _resume()
    stages = [_check("environment", {}, 15, 90), modes.pop("bsp")]
    stages += [first.pop("speed-32px-b500-eager"), first.pop("speed-32px-b500-compiled")]
    stages += [_check("tests", {}, 60, 240), modes.pop("step"), modes.pop("gradients")]
    stages += [processes.pop("two-processes-bsp")]
    stages += [first.pop("kernels-32px-b500-eager"), first.pop("kernels-32px-b500-compiled")]
    stages += [resumed.pop(f"resume-{sync}-deterministic") for sync in ("bsp", "step")]
    stages += [*modes.values(), *processes.values(), *resumed.values()]
    stages += [*first.values(), *_lines()]
    stages += _tuning() + _arms(SEEDS[:1], SHORT)
    for seed in SEEDS:
        stages += _arms([seed], None)
    return stages + _others()


def _check(name: str, given: dict[str, Any], *seconds: float, dry: bool = True) -> Stage:
    """Return a stage that says whether something works, while others run."""
    call = f"experiments.benchmarks.gpu.checks:{name.partition('-')[0]}"
    return Stage(name, call, given, *seconds, dry=dry, alone=False)


def _modes() -> dict[str, Stage]:
    return {name: _check(f"mode-{name}", {"name": name}, 25, 120) for name in MODES}


def _speed() -> dict[str, Stage]:
    """Return the pairs of train.py and the bare step, the eager ones first."""
    stages = []
    for compiled in (False, True):
        for resolution, batch in ((32, 500), (24, 500), (32, 200), (32, 64), (24, 200), (24, 64)):
            name = f"{resolution}px-b{batch}-{'compiled' if compiled else 'eager'}"
            given = {"resolution": resolution, "batch": batch, "compiled": compiled}
            seconds = (90, 300) if compiled else (50, 200)
            goal = (resolution, batch) == (32, 500)
            call, dry = "experiments.benchmarks.gpu.speed:images_per_second", goal and not compiled
            stages.append(Stage(f"speed-{name}", call, given, *seconds, dry=dry))
            if goal or (resolution, batch) == (24, 200):
                call = "experiments.benchmarks.gpu.speed:kernels"
                stages.append(Stage(f"kernels-{name}", call, given, *seconds, dry=dry))
    return {stage.name: stage for stage in stages}


def _resume() -> dict[str, Stage]:
    stages = [
        _check(
            f"resume-{sync}-{'deterministic' if deterministic else 'plain'}",
            {"sync": sync, "deterministic": deterministic},
            *(60, 240),
            dry=(sync, deterministic) == ("bsp", True),
        )
        for deterministic in (True, False)
        for sync in ("bsp", "step")
    ]
    return {stage.name: stage for stage in stages}


def _lines() -> list[Stage]:
    stages = []
    for resolution in (32, 24):
        given = {"resolution": resolution}
        call = "experiments.benchmarks.gpu.lines:step_lines"
        dry = resolution == 32
        stages.append(Stage(f"lines-{resolution}px", call, given, 50, 180, dry=dry))
    for limit in (8.0, None):
        given = {"resolution": 32, "limit_gib": limit}
        call = "experiments.benchmarks.gpu.lines:largest_batch"
        name = "whole" if limit is None else f"{limit:g}gib"
        stages.append(Stage(f"largest-{name}", call, given, 60, 240, dry=limit is not None))
    return stages


def _processes() -> dict[str, Stage]:
    stages = {}
    for call in ("two_processes", "killed_rank"):
        for sync in ("bsp", "step"):
            name, given = f"{call.replace('_', '-')}-{sync}", {"sync": sync}
            check, dry = f"experiments.benchmarks.gpu.checks:{call}", sync == "bsp"
            stages[name] = Stage(name, check, given, 60, 240, dry=dry, alone=False)
    return stages


def _training(name: str, given: dict[str, Any], *seconds: float, **how: Any) -> Stage:
    call = "experiments.benchmarks.gpu.training:train_arm"
    return Stage(name, call, given, *seconds, **how, alone=False)  # its figure is an accuracy


def _tuning() -> list[Stage]:
    """Return runs on held-out training images, one for each arm and rate."""
    stages = []
    for arm, rates in RATES.items():
        for rate in rates:
            given = {"config": ARMS[arm], "seed": TUNED_ON_SEED, "epochs": SHORT}
            given["flags"] = ["--compile", "--lr", f"{rate:g}", "--holdout", f"{HELD_OUT:g}"]
            dry = arm == "all_large" and rate in (0.1, 0.2)
            stages.append(_training(f"tune-{arm}-lr{rate:g}", given, 100, 400, dry=dry))
    return stages


def _arms(seeds: tuple[int, ...] | list[int], epochs: int | None) -> list[Stage]:
    """Return the arms of the paper; short ones first, and a tuned rate only once it is known."""
    tuned = {f"{arm}_tuned": arm for arm in RATES}
    stages = []
    for seed in seeds:
        for arm, config in (ARMS | {arm: ARMS[of] for arm, of in tuned.items()}).items():
            given = {"config": config, "seed": seed, "epochs": epochs}
            if epochs is None:  # long enough for compilation to pay
                given["flags"] = ["--compile", "--eval-every", "10"]
            names = (stage.name for stage in _tuning())
            needs = tuple(name for name in names if name.startswith(f"tune-{tuned.get(arm)}-"))
            if needs:
                given["rate_from"] = list(needs)
            name = f"arm-{arm}-{f'{epochs}epochs' if epochs else 'full'}-seed{seed}"
            seconds = (100, 400) if epochs else (240, 570)
            dry = epochs is not None and arm in ("ddp512", "hybrid")
            stages.append(_training(name, given, *seconds, needs=needs, dry=dry))
    return stages


def _others() -> list[Stage]:
    return [
        _training(
            f"{kind}-{arm}-seed{seed}",
            {"config": config, "seed": seed},
            *(330, 570),
            dry=seed == 0 and arm == "best",
        )
        for seed in SEEDS
        for kind, configs in (("recipe", BEST), ("conference", CONFERENCE))
        for arm, config in configs.items()
    ]
