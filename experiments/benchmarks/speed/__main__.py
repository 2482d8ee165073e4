"""How fast training is, beside the hardware's limit and other trainers, in one run.

    python -m experiments.benchmarks.speed --dataset FOLDER --timm path/to/timm's/train.py

writes experiments/results/speed.csv: medians, lowest and highest of turns that alternate, and
ratios between turns that followed each other. About half an hour on two cores; --parts measures
some again, and keeps what the file has of the others.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dbsl.base.machine import threads_of_process
from experiments.benchmarks.record import record

ROOT = Path(__file__).resolve().parents[3]
PARTS = ("training", "startup")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the parts that are asked for, and write them to a CSV."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.benchmarks.speed", description=__doc__.splitlines()[0]
    )
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=PARTS)
    add("--dataset", default="uoft-cs/cifar100", help="a hub id or a folder")
    add("--timm", type=Path, help="timm's own train.py, from its repository")
    add("--model", default="resnet18")
    add("--batch", type=int, default=64)
    add("--resolutions", type=int, nargs="+", default=[24, 32])
    add("--precisions", nargs="+", choices=("no", "bf16"), default=["no", "bf16"])
    add("--compile", action="store_true", help="time train.py --compile as well")
    add("--images", type=int, default=512, help="that an arm trains on in a turn")
    add("--turns", type=int, default=7)
    add("--output", type=Path, default=ROOT / "experiments/results/speed.csv")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(threads_of_process())
    for part in arguments.parts:
        print(f"measuring {part}", flush=True)
        _write(arguments.output, _measure(part, arguments))


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write a part's rows into the one table of all parts, in place of its earlier ones."""
    measured = {row["part"] for row in rows}
    record(
        path,
        rows,
        "python -m experiments.benchmarks.speed",
        keep=lambda row: row["part"] not in measured,
    )


def _measure(part: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    if part == "startup":
        from experiments.benchmarks.speed import startup

        return startup.rows()
    from experiments.benchmarks.speed.arms import Settings
    from experiments.benchmarks.speed.steps import training_rows

    base = Settings(
        dataset=arguments.dataset,
        model=arguments.model,
        resolution=arguments.resolutions[-1],
        batch=arguments.batch,
        precision="no",
    )
    return training_rows(
        base,
        arguments.precisions,
        arguments.resolutions,
        images=arguments.images,
        turns=arguments.turns,
        timm_script=arguments.timm,
        compiled=arguments.compile,
    )


if __name__ == "__main__":
    main()
