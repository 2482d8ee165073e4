"""The stages, in the order of what they are worth."""

from __future__ import annotations

from typing import Any

from experiments.benchmarks.gpu.runner import Stage
from experiments.benchmarks.gpu.runs import MODES
from experiments.benchmarks.gpu.training import ARMS

SEEDS = (0, 1, 2)


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
    return stages + _arms()


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
    call, stages = "experiments.benchmarks.gpu.checks:two_processes", {}
    for sync in ("bsp", "step"):
        name, dry = f"two-processes-{sync}", sync == "bsp"
        stages[name] = Stage(name, call, {"sync": sync}, 60, 240, dry=dry, alone=False)
    return stages


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
