"""All that only a GPU can show, in the order of its worth; cut off at any moment, it goes on.

    alias gpu="python -m experiments.benchmarks.gpu"; results=experiments/results/gpu
    gpu --out $results                                # the stages, the first ones first
    gpu --out OUT --deadline 540 --done $results/*.jsonl
    gpu --pack runs/pack --data CIFAR100              # for a machine without a network

Each result is a line of OUT/results.jsonl; the end of each stage's output is in OUT/log.txt.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from experiments.benchmarks.gpu.data import packed_files
from experiments.benchmarks.gpu.runner import ROOT, Stage, run_stages
from experiments.benchmarks.gpu.stages import all_stages
from experiments.benchmarks.gpu.training import needs_all_images

STANDIN = Path(__file__).resolve().parent / "standin"
CALL_S = 540.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stages, or pack; return the exit status."""
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
    add("--dry", action="store_true", help="tiny sizes on any device; proves nothing about a GPU")
    add("--data", help="folder of CIFAR-100 (parquet, or pieces of --pack); unset: from the hub")
    add("--work", default=str(ROOT / "runs/gpu"), help="folder of training runs, to be resumed")
    add("--commit", help="commit of the code; unset: what git says")
    add("--pack", type=Path, help="write what a call has to carry into this new folder, and end")
    add("--piece-mib", type=float, help="bound of a piece; unset: 60 less the tracked files")
    add("--list", action="store_true", help="print the stages and how long they may take")
    given = parser.parse_args(argv)
    try:
        stages = _chosen(given.stages, given.dry)
        if given.list:
            for stage in stages:
                print(f"{stage.name:40} {stage.expected_s:5.0f} s, at most {stage.limit_s:.0f} s")
            return 0
        if given.pack:
            return _pack(given, stages)
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
    settings = {"dry": given.dry, "data": data, "work": str(Path(given.work).resolve())}
    with tempfile.TemporaryDirectory() as wheels:
        failures = run_stages(
            stages,
            given.out,
            done=given.done,
            deadline_s=given.deadline,
            settings=settings,
            environment=stage_environment(data, Path(wheels), Path(settings["work"])),
            facts={"commit": given.commit or _commit()},
        )
    return int(failures > 0)


def stage_environment(data: str, wheels: Path, work: Path) -> dict[str, str]:
    """Return the environment of stages: carried wheels, and the stand-in where it is needed.

    What one stage has compiled the next ones find in the work folder.
    """
    paths = []
    packed = Path(data).is_dir() and bool(packed_files(data, "train"))
    if packed or importlib.util.find_spec("datasets") is None:
        paths.append(str(STANDIN))
    if Path(data).is_dir():
        from experiments.benchmarks.gpu.pack import install_wheels

        paths += [str(wheels)] if install_wheels(Path(data), wheels) else []
    before = os.environ.get("PYTHONPATH")
    paths += [str(ROOT), *([before] if before else [])]
    offline = {"HF_HUB_OFFLINE": "1"} if Path(data).is_dir() or data == "digits" else {}
    kept = {"TORCHINDUCTOR_CACHE_DIR": str(work / "inductor")}
    return {**os.environ, **kept, "PYTHONPATH": os.pathsep.join(paths), **offline}


def _pack(given: argparse.Namespace, stages: Sequence[Stage]) -> int:
    from experiments.benchmarks.gpu.pack import MIB, calls, missing_packages, pack, tracked_bytes

    tracked = tracked_bytes()
    bound = (given.piece_mib or 60 - tracked / MIB) * MIB
    if given.data and not Path(given.data).is_dir():
        raise ValueError(f"--data must be a folder of parquet files, got {given.data!r}")
    pieces = pack(given.pack, Path(given.data) if given.data else None, int(bound))
    print(f"wheels: {', '.join(f'{n} {v}' for n, v in missing_packages().items())}")
    print(f"{'tracked files of the repository':40} {tracked:12,} bytes")
    for piece in pieces:
        images = ", ".join(f"{count} {split}" for split, count in piece.images.items())
        print(f"{piece.path!s:40} {piece.bytes:12,} bytes  {images}")
    print(
        f"\nEvery call carries the repository and one piece, and takes at most {CALL_S:.0f} s:\n\n"
        f"  python3 -m experiments.benchmarks.gpu --out OUT --data {given.pack} "
        f"--deadline {CALL_S:.0f} --commit {_commit()[:12]} "
        "--done experiments/results/gpu/*.jsonl\n\n"
        "Put its results.jsonl into experiments/results/gpu/ under another name before the next."
    )
    if len(pieces) > 1:
        print(
            "Full training needs all pieces: bring the others first, each with a call of `true`,\n"
            "to a machine that is kept. If all goes as expected:"
        )
    for number, call in enumerate(calls(stages, CALL_S), 1):
        more = f" to {call[-1].name} ({len(call)} stages)" if len(call) > 1 else ""
        whole = any(needs_all_images(stage.arguments) for stage in call)
        print(f"  call {number}: {call[0].name}{more}{', all pieces' * whole}")
    return 0


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
