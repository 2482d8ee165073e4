"""What ``--advise`` predicts, and what real epochs take. Needs root, ip, tc and cgroups.

    sudo python -m experiments.benchmarks.demos.advise --dataset DATASET
    sudo python -m experiments.benchmarks.demos.advise --dataset DATASET --developed

For each setting the ranks are started once, and fork: the adviser first, then a few epochs of the
way that it advises and of all others but those that `is_left_out` names. Settings were held out
from the making of the model, but for those of ``--developed``. Two sets came before: first.csv,
with an earlier model and half as many samples, and second.csv, ended after 9 of 16. In both cores
halted between their quotas, and were slow after they woke; see `quotas`. It needs a machine with
nothing else on it. Rows of settings that are there are not made again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from experiments.benchmarks.demos.arms import run_ranks
from experiments.benchmarks.demos.link import ADDRESSES, link
from experiments.benchmarks.demos.quota import quotas
from experiments.benchmarks.demos.table import Table
from experiments.benchmarks.ranks import end_in_order, free_port, preload

MODULE = "experiments.benchmarks.demos.advise"
FOLDER = Path("experiments/results/advise")
BATCH, WARM, LONGEST_S = 32, 1, 12.0
EPOCHS, ENOUGH_S = 2, 6.0  # of a way are measured at least


@dataclass(frozen=True)
class Setting:
    """Processes by their part of a core's time, on two machines with a link between, a core each.

    Attributes:
        megabits: Of the link, per second; None: as fast as the machine is.
    """

    parts: tuple[float, ...]
    megabits: float | None
    model: str

    def __str__(self) -> str:
        parts = ":".join(f"{part:g}" for part in self.parts)
        return f"{parts} {self.megabits and f'{self.megabits:g}'} {self.model}"


SMALL, LARGE = "test_resnet", "resnet10t"  # 0.4 and 4.9 M parameters
SAMPLES = {SMALL: 4096, LARGE: 1024}  # of an epoch
EVEN, HALF, QUARTER = (0.9, 0.9), (0.9, 0.45), (0.9, 0.225)
EVEN_3, HALF_3, QUARTER_3 = (0.45,) * 3, (0.6, 0.3, 0.3), (0.7, 0.175, 0.175)
EVEN_4, HALF_4, QUARTER_4 = (0.45,) * 4, (0.6, 0.3, 0.6, 0.3), (0.7, 0.175, 0.7, 0.175)
HELD_OUT = (
    Setting(EVEN, 10, LARGE),
    Setting(HALF, 1000, SMALL),
    Setting(HALF, 100, LARGE),
    Setting(QUARTER, None, LARGE),
    Setting(QUARTER, 1000, LARGE),
    Setting(QUARTER, 100, SMALL),
    Setting(EVEN_3, None, SMALL),
    Setting(EVEN_3, 1000, SMALL),
    Setting(EVEN_3, 100, LARGE),
    Setting(HALF_3, None, LARGE),
    Setting(HALF_3, 100, SMALL),
    Setting(QUARTER_3, 10, SMALL),
    Setting(EVEN_4, 100, LARGE),
    Setting(HALF_4, None, SMALL),
    Setting(HALF_4, 10, SMALL),
    Setting(QUARTER_4, 1000, SMALL),
)
DEVELOPED = (
    Setting((0.4, 0.4), 100, SMALL),
    Setting((0.6, 0.2), None, SMALL),
    Setting((0.4, 0.4), 200, LARGE),
    Setting((0.3,) * 4, 300, SMALL),
    Setting(QUARTER_4, None, LARGE),
    Setting(QUARTER, None, SMALL),
)


def main(argv: Sequence[str] | None = None) -> None:
    """Advise and measure in each setting, and say how far off predictions are."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--label-column", default="coarse_label")
    parser.add_argument(
        "--developed", action="store_true", help="the settings that are not held out"
    )
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--rank", type=Path, help="internal: what this rank is to run")
    arguments = parser.parse_args(argv)
    if arguments.rank:
        run_rank(json.loads(arguments.rank.read_text()))
        return
    end_in_order()
    name, settings = ("developed", DEVELOPED) if arguments.developed else ("ways", HELD_OUT)
    table = Table(arguments.folder / f"{name}.csv", ("setting", "way"), MODULE)
    data = {"dataset": arguments.dataset, "label-column": arguments.label_column}
    for setting in settings:
        if not any(row["setting"] == str(setting) for row in table.rows):
            for row in measure(setting, data):
                table.add(setting, row.pop("way"), row)
    verdict = errors(table.rows)
    print(json.dumps(verdict, indent=2))
    errors_figure(table.rows).savefig(arguments.folder / f"{name}.png")


def measure(setting: Setting, data: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each way of a setting: predicted and measured seconds of an epoch."""
    sides = machines(len(setting.parts))  # network namespaces
    flags = {
        **data,
        "model": setting.model,
        "train-samples": SAMPLES[setting.model],
        "eval-samples": 16,
    }
    flags |= {"large-batch-size": BATCH, "resolutions": 32, "lr": 0.01, "mixed-precision": "no"}
    with (
        tempfile.TemporaryDirectory() as scratch,
        link(setting.megabits) as across,
        quotas(setting.parts, sides) as (slowed, _),
    ):
        job = {"flags": [f"--{n}={v}" for n, v in flags.items()], "folder": scratch}
        job |= {"ports": [free_port() for _ in range(40)]}
        file = Path(scratch, "job.json")
        file.write_text(json.dumps(job))
        prefixes = [[*own, *across[side]] for own, side in zip(slowed, sides, strict=True)]
        command = [sys.executable, "-m", MODULE, "--dataset", "none", "--rank", str(file)]
        run_ranks(command, prefixes, ADDRESSES[0])
        found = json.loads(Path(scratch, "advice.json").read_text())
        rows = []
        for number, way in enumerate(found["ways"]):
            log = Path(scratch, f"run-{number}/metrics.jsonl")
            times = epoch_times(log) if log.exists() else []
            measured_s = fmean(times) if times else float("nan")
            row = {"way": way["name"], "predicted_s": way["epoch_s"], "measured_s": measured_s}
            row["spread"] = (max(times) - min(times)) / measured_s if times else float("nan")
            row |= {"recommended": float(way["flags"] == found["recommended"])}
            row |= {"sure": found["sure"], "advising_s": found["advising_s"]}
            rows.append(row)
    return rows


def machines(count: int) -> list[int]:
    """Return the machine, 0 or 1, of each of so many processes."""
    return [rank * 2 // count for rank in range(count)]


def run_rank(job: dict[str, Any]) -> None:
    """Advise in a fork of this process, then train each way in another (a rank's process)."""
    preload()
    of, own = machines(int(os.environ["WORLD_SIZE"])), int(os.environ["RANK"])
    os.environ["LOCAL_RANK"] = str(own - of.index(of[own]))
    folder, rank, ports = Path(job["folder"]), os.environ["RANK"], iter(job["ports"])
    advice, began = folder / f"advice-{rank}.json", time.perf_counter()
    more = ["--advise", "--json", f"--output-dir={folder}/advice"]
    _forked([*job["flags"], *more], next(ports), advice)
    whole = folder / "advice.json"
    if rank == "0":
        found = json.loads(advice.read_text())
        found["advising_s"] = time.perf_counter() - began
        for way in found["ways"]:
            way["name"] = _name(way["flags"])
        part = whole.with_suffix(".part")
        part.write_text(json.dumps(found))
        part.rename(whole)
    while not whole.exists():
        time.sleep(0.1)
    common = ["--no-noise-scale", "--no-save-best", "--report-to=none", "--checkpoint-every=0"]
    found = json.loads(whole.read_text())
    for number, way in enumerate(found["ways"]):
        port = next(ports)
        if way["flags"] == found["recommended"] or not is_left_out(way):
            own = [*shlex.split(way["flags"]), f"--output-dir={folder}/run-{number}"]
            epochs = WARM + max(EPOCHS, math.ceil(ENOUGH_S / way["epoch_s"]))
            flags = [*job["flags"], *common, f"--epochs={epochs}", *own]
            _forked(flags, port, Path(os.devnull))


def is_left_out(way: dict[str, Any]) -> bool:
    """Whether a way is not measured: its epochs are too long, or it lies between two others."""
    between = ("rounds-per-epoch 2", "wire int4", "wire int4 rounds-per-epoch 2")
    return way["epoch_s"] > LONGEST_S or way["name"] in between


def _forked(flags: list[str], port: int, output: Path) -> None:
    child = os.fork()
    if not child:
        import train
        from dbsl.base.errors import one_line_errors
        from dbsl.config.parse import parse_config

        os.environ["MASTER_PORT"] = str(port)
        with output.open("w") as file:
            os.dup2(file.fileno(), 1)
        status = 1
        try:
            with one_line_errors():
                train.main(parse_config(train.Config, flags))
            status = 0
        finally:
            sys.stdout.flush()
            os._exit(status)
    _, status = os.waitpid(child, 0)
    if status:
        raise RuntimeError(f"train.py {' '.join(flags)} ended with {status}")


def _name(flags: str) -> str:
    """Return a way by its flags, without the step times that go with them."""
    words = shlex.split(flags)
    pairs = zip(words[::2], words[1::2], strict=True)
    left = ("--slope", "--intercept", "--floor", "--large-batch-size")
    return " ".join(f"{flag[2:]} {value}" for flag, value in pairs if flag not in left)


def epoch_times(log: Path) -> list[float]:
    """Return the seconds of a run's epochs, those that warm up left out."""
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    ends = [row["train_time_s"] for row in rows if row["event"] == "eval"]
    return [after - before for before, after in zip(ends[WARM - 1 :], ends[WARM:], strict=False)]


def errors(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the median and the worst relative error, and how good the advice was, by setting."""
    known = _known(rows)
    off = [abs(float(r["predicted_s"]) / float(r["measured_s"]) - 1) for r in known]
    late = {}
    for setting in dict.fromkeys(row["setting"] for row in known):
        own = [row for row in known if row["setting"] == setting]
        best = min(float(row["measured_s"]) for row in own)
        taken = (float(row["measured_s"]) for row in own if float(row["recommended"]))
        late[setting] = next(taken, float("nan")) / best - 1
    return {"median": median(off), "worst": max(off), "ways": len(off), "advised_over_best": late}


def errors_figure(rows: Sequence[dict[str, Any]]):
    """Return measured seconds over predicted ones of each way; looks are links and processes."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    from experiments.plots.evidence import COLORS

    figure = Figure(figsize=(6, 6), layout="constrained")
    axes = figure.subplots()
    known, names = _known(rows), ("predicted_s", "measured_s")
    links = dict.fromkeys(_looks(row)[0] for row in known)
    for megabits, color in zip(links, COLORS, strict=False):
        for count, marker in zip((2, 3, 4), "o^s", strict=True):
            own = [row for row in known if _looks(row) == (megabits, count)]
            text = f"{count} processes, {'no link' if megabits == 'None' else f'{megabits} Mb/s'}"
            values = ([float(row[name]) for row in own] for name in names)
            if own:
                axes.plot(*values, marker, ms=4, color=color, label=text)
    seconds = [float(row[name]) for row in known for name in names]
    ends = min(seconds), max(seconds)
    axes.plot(ends, ends, color="black", lw=1)
    low, high = ([factor * end for end in ends] for factor in (0.75, 1.25))
    axes.fill_between(ends, low, high, color="0.9", zorder=0)
    axes.set(xscale="log", yscale="log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.set(xlabel="predicted, s an epoch", ylabel="measured, s an epoch (grey: 25 % off)")
    axes.legend(fontsize=8, frameon=False)
    return figure


def _looks(row: dict[str, Any]) -> tuple[str, int]:
    """Return the link and the processes of a row."""
    parts, megabits, _ = row["setting"].split()
    return megabits, parts.count(":") + 1


def _known(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["measured_s"] not in ("", "nan")]


if __name__ == "__main__":
    main()
