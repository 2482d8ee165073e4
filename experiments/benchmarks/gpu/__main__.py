"""All that only a GPU can show, in the order of its worth; cut off at any moment, it goes on.

    alias gpu="python -m experiments.benchmarks.gpu"; results=experiments/results/gpu
    gpu --out OUT --quarter-hour                      # what no CPU shows, for 570 s
    gpu --out OUT --deadline 540 --done $results/*.jsonl

Each result is a line of OUT/results.jsonl; the end of each stage's output is in OUT/log.txt.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.benchmarks.gpu.runner import ROOT, Stage, run_stages
from experiments.benchmarks.gpu.stages import QUARTER, all_stages


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stages; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--out", type=Path, help="folder of the results; those that it has are not made again")
    add("--deadline", type=float, help="seconds from now at which everything ends")
    add("--done", type=Path, nargs="+", default=[], help="results of other calls, to leave out")
    add("--stages", help="comma-separated names, or their beginnings: mode,speed-32px")
    add("--quarter-hour", action="store_true", help="the first stages alone, for 570 s")
    add("--dry", action="store_true", help="tiny sizes on any device; proves nothing about a GPU")
    add("--data", help="folder of CIFAR-100; unset: from the hub")
    add("--work", default=str(ROOT / "runs/gpu"), help="folder of training runs, to be resumed")
    add("--commit", help="commit of the code; unset: what git says")
    add("--list", action="store_true", help="print the stages and how long they may take")
    given = parser.parse_args(argv)
    try:
        if given.quarter_hour:
            given.stages, given.deadline = given.stages or ",".join(QUARTER), given.deadline or 570
        stages = _chosen(given.stages, given.dry)
        if given.list:
            for stage in stages:
                print(f"{stage.name:40} {stage.expected_s:5.0f} s, at most {stage.limit_s:.0f} s")
            return 0
        if not given.out:
            raise ValueError("--out must name a folder for the results")
        return _run(given, stages)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _chosen(names: str | None, dry: bool) -> list[Stage]:
    stages = [stage for stage in all_stages() if stage.dry or not dry]
    if names is None:
        return stages
    wanted = names.split(",")
    for name in wanted:
        if not any(_matches(stage, name) for stage in stages):
            raise ValueError(f"--stages must name stages (see --list), got {name!r}")
    return [stage for stage in stages if any(_matches(stage, name) for name in wanted)]


def _matches(stage: Stage, name: str) -> bool:
    return stage.name == name or stage.name.startswith(f"{name}-")


def _run(given: argparse.Namespace, stages: Sequence[Stage]) -> int:
    data = given.data or ("digits" if given.dry else "uoft-cs/cifar100")
    if given.data and given.data != "digits" and not Path(given.data).is_dir():
        raise ValueError(f"--data must be a folder that exists, got {given.data!r}")
    if Path(data).is_dir():
        data = str(Path(data).resolve())
    work = Path(given.work).resolve()
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(work / "inductor"),
    }  # for all stages
    if Path(data).is_dir() or data == "digits":
        environment["HF_HUB_OFFLINE"] = "1"
    failures = run_stages(
        stages,
        given.out,
        done=given.done,
        deadline_s=given.deadline,
        settings={"dry": given.dry, "data": data, "work": str(work)},
        environment=environment,
        facts={"commit": given.commit or _commit()},
    )
    return int(failures > 0)


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
