"""The stages, in the order of what they are worth."""

from __future__ import annotations

from typing import Any

from experiments.benchmarks.gpu.runner import Stage
from experiments.benchmarks.gpu.runs import MODES
from experiments.benchmarks.gpu.training import ARMS

SEEDS = (0, 1, 2)
QUARTER = {  # how the names of its stages begin, in the order of their worth
    "bare": "a bare loop: eager, graphed, compiled",
    "speed-32px-b500-eager": "train.py against it",
    "kernels-24px-b200-compiled": "a short step",
    "between-rounds": "rounds of 25 and of 100 steps, and the noise probe",
    "lines-24px": "predicted times and memory",
    "largest": "the largest batch",
    "library": "import dbsl, on CUDA",
}


def all_stages() -> list[Stage]:
    """Return every stage, those of the quarter of an hour first; `dry`: it is in a dry run."""
    stages = [*_speed(), *_lines(), *_quarter()]
    first = [own for name in QUARTER for own in stages if own.name.startswith(name)]
    rest = [own for own in stages if own not in first]
    checks = [_check("environment", {}, 15, 90), _check("tests", {}, 60, 240)]
    return [*first, *checks, *_modes(), *_processes(), *_resume(), *rest, *_arms()]


def _quarter() -> list[Stage]:
    module, stages = "experiments.benchmarks.gpu.quarter", []
    for resolution, batch in ((32, 500), (24, 200), (24, 64)):
        given = {"resolution": resolution, "batch": batch}
        name, dry = f"bare-{resolution}px-b{batch}", resolution == 32
        stages.append(Stage(name, f"{module}:bare", given, 50, 200, dry=dry))
    given = {"resolution": 32, "batch": 500, "compiled": True, "more": True}
    call = "experiments.benchmarks.gpu.speed:images_per_second"
    stages.append(Stage("between-rounds", call, given, 150, 300))
    return [*stages, Stage("library", f"{module}:library", {}, 30, 120)]


def _check(name: str, given: dict[str, Any], *seconds: float, dry: bool = True) -> Stage:
    """Return a stage that says whether something works, while others run."""
    function = "two_processes" if name.startswith("two") else name.partition("-")[0]
    call = f"experiments.benchmarks.gpu.checks:{function}"
    return Stage(name, call, given, *seconds, dry=dry, alone=False)


def _modes() -> list[Stage]:
    return [_check(f"mode-{name}", {"name": name}, 25, 120) for name in MODES]


def _speed() -> list[Stage]:
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
                dry = f"kernels-{name}" in QUARTER
                stages.append(Stage(f"kernels-{name}", call, given, 50, 200, dry=dry))
    return stages


def _resume() -> list[Stage]:
    return [
        _check(f"resume-{sync}-deterministic", {"sync": sync}, 60, 240, dry=sync == "bsp")
        for sync in ("bsp", "step")
    ]


def _lines() -> list[Stage]:
    stages = []
    for resolution in (32, 24):
        given = {"resolution": resolution}
        call = "experiments.benchmarks.gpu.lines:step_lines"
        dry = resolution == 24
        stages.append(Stage(f"lines-{resolution}px", call, given, 50, 180, dry=dry))
    for limit in (8.0, None):
        given = {"resolution": 32, "limit_gib": limit}
        call = "experiments.benchmarks.gpu.lines:largest_batch"
        name = "whole" if limit is None else f"{limit:g}gib"
        stages.append(Stage(f"largest-{name}", call, given, 40, 240, dry=limit is not None))
    return stages


def _processes() -> list[Stage]:
    return [
        _check(f"two-processes-{sync}", {"sync": sync}, 60, 240, dry=sync == "bsp")
        for sync in ("bsp", "step")
    ]


def _arms() -> list[Stage]:
    """Return the arms of the paper, all with one seed before any with the next."""
    call = "experiments.benchmarks.gpu.training:train_arm"
    return [
        Stage(
            f"arm-{arm}-full-seed{seed}",
            call,
            {"arm": arm, "seed": seed},
            *(240, 570),
            dry=seed == 0 and arm in ("ddp512", "hybrid"),
            alone=False,  # its figure is an accuracy
        )
        for seed in SEEDS
        for arm in ARMS
    ]
