"""Advice for these processes (``train.py --advise``), or for machines that a file describes.

``python -m dbsl.advise --machines cluster.yaml``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import numpy as np
import yaml
from accelerate import Accelerator

from dbsl.base.errors import SettingError, duration, px
from dbsl.base.files import check_folder, check_output, save_figure
from dbsl.base.machine import lazy_import
from dbsl.cluster.formats import numbers_of, trained_shapes
from dbsl.cluster.wire import refused_by_all
from dbsl.config.fields import Amount, Count, Positive, Share, check_fields, refuse
from dbsl.config.parse import parse_flags
from dbsl.config.settings import RunConfig
from dbsl.model import build_model
from dbsl.plan.types import TimeModel
from dbsl.run.folder import default_folder
from dbsl.run.training import Run
from dbsl.tools.advise.ways import Measured, Way, advise, ways_of

emulate, figures = lazy_import("dbsl.extras.emulate"), lazy_import("matplotlib.figure")
measuring = lazy_import("dbsl.tools.advise.measure")  # needs extras

T = TypeVar("T")

# What docs/results.md says of accuracy, in equal time of four simulated workers.
ACCURACY = (
    "what a way does to accuracy is not known. 5,000 images of CIFAR-100, four workers, no link "
    "cost, equal time (docs/results.md): joint steps of 128 samples 47.5 %, of 512 43.6 %; four "
    "merges an epoch 44.5 %, one 42.5 %"
)
_MOST_GPUS = 4096  # of a file; each is planned for
_FASTEST_GBPS = 1000  # what is measured above that is noise


# --- of these processes


def advise_run(
    config: RunConfig, prepare: Callable[[RunConfig], Run], accelerator: Accelerator
) -> None:
    """Measure, and print the advice; all is in memory until the picture is written."""
    folder = Path(config.output_dir) if config.output_dir else default_folder(config)
    path = folder.with_name(f"{folder.name}-ways.png")  # the run will make its folder
    with refused_by_all(accelerator):
        if accelerator.is_main_process:
            check_folder("output_dir", path.parent)
    given = {"slope": config.slope or (1e-3,), "intercept": config.intercept or (1e-2,)}
    with redirect_stdout(sys.stderr if config.json else sys.stdout):
        run = prepare(replace(config, **given, profile=None, profile_refresh=False))
        # What was solved by those step times is left open again.
        left = {"small_batch_size": config.small_batch_size}
        # A run with machines as workers does not advise.
        run = replace(run, config=replace(run.config, advise=False, json=False, **left))
        bench = measuring.Bench(run, accelerator)
        measured = bench.measure()
        evaluation_s = bench.evaluation_s()
    if not accelerator.is_main_process:
        return
    ways = ways_of(run.config, measured)
    link = measured.link
    rate = f"{1e3 * link.gbps:.4g} Mb/s" if link.gbps < _FASTEST_GBPS else "too fast to measure"
    facts = (
        f"link {rate}, {link.ms:.2g} ms a message; loading "
        f"{100 * bench.loading:.0f} % of a step; an evaluation {duration(evaluation_s)} more"
    )
    tell(ways, config, measured.sure, facts + noise_of(folder), as_json=config.json)
    save_figure(ways_figure(ways), path)
    print(f"picture: {path}", file=sys.stderr if config.json else sys.stdout)


def noise_of(folder: Path) -> str:
    """Return the line on the noise scale in the summary of the run that is there, if one is."""
    try:
        found = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        return f"\n{found['noise_advice']} ({folder})"
    except (OSError, ValueError, KeyError):
        return ""


# --- what is said


def tell(
    ways: Sequence[Way], given: RunConfig, sure: float, facts: str, *, as_json: bool = False
) -> None:
    """Print the ways and the advice; `given` are the settings of the command."""
    taken, why = advise(ways)
    if as_json:
        names = ("epoch_s", "images_per_s", "bytes_per_epoch", "memory_mib")
        rows = [{"flags": w.flags(given), **{n: getattr(w, n) for n in names}} for w in ways]
        print(json.dumps({"ways": rows, "recommended": taken.flags(given), "sure": sure}))
        return
    columns = ("way", "s/epoch", "images/s", "MB sent", "MiB", "compute", "exchange", "waiting")
    print(f"{columns[0]:<28}" + "".join(f"{name:>10}" for name in (*columns[1:], "steps")))
    for way in ways:
        mean_s, least_s, most_s = fmean(way.compute_s), min(way.waiting_s), max(way.waiting_s)
        waiting = f"{least_s:.2g}-{most_s:.2g}" if most_s > 0.005 * way.epoch_s else "0"
        memory = "" if way.memory_mib is None else f"{way.memory_mib:.0f}"
        cells = (f"{way.epoch_s:.3g}", f"{way.images_per_s:.0f}")
        cells += (f"{way.bytes_per_epoch / 1e6:.3g}", memory, f"{mean_s:.3g}")
        exchange_s = max(0.0, way.exchange_s)  # noise: steps together were faster than alone
        cells += (f"{exchange_s:.3g}", waiting, str(way.steps))
        print(f"{way.name:<28}" + "".join(f"{cell:>10}" for cell in cells))
    print(f"\n{facts}\n{ACCURACY}")
    if sure > 0.05:
        print(f"what was measured twice differs by up to {100 * sure:.0f} %: so do predictions")
    print(f"advised: {taken.name} ({why})\n  {taken.flags(given)}")


def ways_figure(ways: Sequence[Way]) -> figures.Figure:
    """Return a bar for each way: what of an epoch is computing, exchange and waiting."""
    from dbsl.extras.pictures import IDLE, LARGE, SMALL

    figure = figures.Figure(figsize=(10, 1.2 + 0.32 * len(ways)), layout="constrained")
    axes, left, names = figure.subplots(), np.zeros(len(ways)), [way.name for way in ways]
    parts = {"computes": (LARGE, [fmean(way.compute_s) for way in ways])}
    parts["exchanges"] = (SMALL, [max(0.0, way.exchange_s) for way in ways])
    known = zip(ways, *(widths for _, widths in parts.values()), strict=True)
    waiting = [max(0.0, way.epoch_s - computes - sends) for way, computes, sends in known]
    parts["waits for the slowest worker"] = (IDLE, waiting)
    for label, (color, widths) in parts.items():
        axes.barh(names, widths, left=left, height=0.7, fc=color, ec="white", label=label)
        left += widths
    for place, way in enumerate(ways):
        axes.text(left[place], place, f" {duration(way.epoch_s)}", va="center", fontsize=9)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("predicted seconds of an epoch, mean of the workers")
    axes.set_title(f"advised: {advise(ways)[0].name}", loc="left", fontsize=11)
    axes.legend(loc="lower right", frameon=False)
    return figure


# --- of machines that a file describes


@dataclass(frozen=True)
class Machine:
    """Machines of one kind."""

    images_per_s: Positive  # one GPU, large batches
    gpus: Count = 1  # per machine
    count: Count = 1  # machines
    step_s: Amount = 0.0  # that a step takes besides its samples


@dataclass(frozen=True)
class Link:
    """A link, by the names of ``--link-gbps``, ``--link-ms`` and ``--link-overlap``."""

    gbps: Positive
    ms: Amount = 0.0
    overlap: Share = 0.0


@dataclass(frozen=True)
class _Arguments:
    """Predict an epoch of each way of training on the machines of a file, and advise one."""

    # YAML file: machines, a list of images_per_s, gpus, count and step_s; link and inner_link with
    # gbps, ms and overlap
    machines: Path
    model: str = "resnet18"  # timm name of the model
    num_classes: Count = 100  # outputs of the classifier
    resolution: Count = 32  # image side, pixels
    samples: Count = 50000  # training samples of an epoch
    large_batch_size: Count = 128  # samples of a step of each GPU
    output: Path | None = None  # file for the picture
    json: bool = False  # print JSON instead of a table

    def __post_init__(self) -> None:
        check_fields(self)


def read_machines(path: Path) -> tuple[list[Machine], Link, Link | None]:
    """Return the machines of a file, the link between them, and the one inside them."""
    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise SettingError(f"machines must be a YAML file, got {path} ({reason})") from None
    try:
        _check_keys("the file", given, ("machines", "link"), ("inner_link",))
        rows, inner = given["machines"], given.get("inner_link")
        refuse([(not isinstance(rows, list), "machines must be a list", rows)])
        machines = [_entry(Machine, "each of machines", row) for row in rows]
        link = _entry(Link, "link", given["link"])
        return machines, link, None if inner is None else _entry(Link, "inner_link", inner)
    except SettingError as error:
        raise SettingError(f"{error} in {path}") from None


def _entry(kind: type[T], name: str, given: Any) -> T:
    """Return the machine or the link that an entry of the file describes."""
    first, *others = (field.name for field in fields(kind))
    _check_keys(name, given, (first,), others)
    made = kind(**{own: _number(value) for own, value in given.items()})
    for own, value in vars(made).items():
        whole = own in ("gpus", "count")
        right = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
        refuse([(not right, f"{own} must be a {'whole ' * whole}number", repr(value))])
    check_fields(made)
    return made


def _number(value: Any) -> Any:
    """Return what YAML takes for a text, such as 1e3, as a number if it is one."""
    if isinstance(value, str):
        with suppress(ValueError):
            number = float(value)
            return int(number) if number.is_integer() else number
    return value


def _check_keys(name: str, given: Any, needed: Sequence[str], others: Sequence[str]) -> None:
    keys = [*given] if isinstance(given, dict) else []
    right = {*needed} <= {*keys} <= {*needed, *others}
    text = f"{name} must set {', '.join(needed)}, and may set {', '.join(others)}"
    refuse([(not right, text, ", ".join(map(str, keys)) or given)])


def of_machines(arguments: _Arguments) -> tuple[RunConfig, Measured]:
    """Return the settings of a run on a file's machines, and what is known of it."""
    machines, link, inner = read_machines(arguments.machines)
    total = sum(machine.count * machine.gpus for machine in machines)
    refuse([(not 2 <= total <= _MOST_GPUS, f"machines must have 2 to {_MOST_GPUS} GPUs", total)])
    each = [machine for machine in machines for _ in range(machine.count)]
    step = total * arguments.large_batch_size
    text = f"samples must be at least those of a step of all GPUs, {step}"
    refuse([(arguments.samples < step, text, arguments.samples)])
    gpus = [machine for machine in each for _ in range(machine.gpus)]
    side, alone = arguments.resolution, len(each) == 1
    model = build_model(arguments.model, arguments.num_classes, (side,), say=str)
    slope, step_s = ([1 / g.images_per_s for g in gpus], [g.step_s for g in gpus])
    between = emulate.EmulatedLink(**vars(inner if alone and inner else link))
    measured = Measured(
        models={side: TimeModel(np.array(slope), np.array(step_s), np.zeros(len(gpus)))},
        shares={side: 1.0},
        samples=arguments.samples,
        least=1,
        large={side: [arguments.large_batch_size] * len(gpus)},
        shapes=trained_shapes(model),
        numbers=numbers_of(model),
        link=between,
        inner=inner and emulate.EmulatedLink(**vars(inner)),
        nodes=[number for number, machine in enumerate(each) for _ in range(machine.gpus)],
    )
    return RunConfig(workers=len(gpus), small_workers=0, resolutions=(side,)), measured


def main(argv: Sequence[str] | None = None) -> None:
    """Advise on a file's machines."""
    arguments = parse_flags(_Arguments, argv, prog="python -m dbsl.advise")
    if arguments.output is not None:
        check_output("output", arguments.output)
    config, measured = of_machines(arguments)
    ways = ways_of(config, measured)
    facts = (
        f"nothing was measured: {arguments.model}{px(arguments.resolution, ' at ')}, by the file"
    )
    tell(ways, RunConfig(), 0.0, facts, as_json=arguments.json)
    if arguments.output:
        save_figure(ways_figure(ways), arguments.output)
