"""The table of docs/gpu.md: what has run on which GPU, and what has not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.benchmarks.gpu.runner import read_results

Line = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """A row: the stages whose names begin so, and what they found in a few words."""

    prefix: str
    stages: int  # that were planned
    what: str
    found: Callable[[Sequence[Line]], str]


def table(files: Iterable[Path]) -> str:
    """Return the table in Markdown. Dry runs, and any on a CPU, are not in it."""
    latest: dict[str, dict[str, Line]] = {}  # by stage, and by the rate that a tuning had found
    for line in sorted(read_results(files), key=lambda line: str(line.get("date"))):
        if line.get("dry") or line.get("device") in ("", "cpu", None):
            continue
        found = latest.setdefault(line["stage"], {})
        if line["status"] == "ok":
            found[_rate(line)] = line
            found.pop("not done", None)
        elif not found or "not done" in found:
            found["not done"] = line
    rows, left = ["| What | Stages done | On | Found |", "| --- | --- | --- | --- |"], []
    for row in ROWS:
        own = [name for name in latest if f"{name}-".startswith(f"{row.prefix}-")]
        lines = [line for name in own for line in latest[name].values()]
        if not lines:
            left.append(f"{row.what} (`{row.prefix}`)")
            continue
        good = [line for line in lines if line["status"] == "ok"]
        bad = [f"{line['stage']} {line['status']}" for line in lines if line["status"] != "ok"]
        devices = sorted({_card(line["device"]) for line in lines})
        found = [row.found(good)] if good else []
        cells = (
            f"{row.what} (`{row.prefix}`)",
            f"{len({line['stage'] for line in good})}/{row.stages}",
            "; ".join(devices),
            "; ".join(found + bad),
        )
        rows.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    if left:
        rows.append(f"| Not yet: {'; '.join(left)} | | | |")
    return "\n".join(rows)


def _rate(line: Line) -> str:
    """Return the learning rate that a tuning gave to a run, as words; nothing for other runs."""
    flags = [*line.get("figures", {}).get("flags", ()), ""]
    return f" at {flags[flags.index('--lr') + 1]}" if "--lr" in flags else ""


def _card(device: str) -> str:
    """Return the word with both letters and digits, such as H100 of "NVIDIA H100 80GB HBM3"."""
    words = device.split()
    return next((x for x in words if x[0].isalpha() and not x.isalpha()), words[-1])


def _machine(lines: Sequence[Line]) -> str:
    found = lines[-1]["figures"]
    device, torch = lines[-1]["device"], lines[-1]["torch"]
    return f"{device}, {found['memory_gib']} GiB, torch {torch}, cuDNN {found['cudnn']}"


def _modes(lines: Sequence[Line]) -> str:
    finite = sum(line["figures"]["finite"] for line in lines)
    return f"losses finite in {finite} of {len(lines)} modes"


def _speed(lines: Sequence[Line]) -> str:
    return _joined(lines, "speed-", "{images_per_s:,.0f} images/s, {of_bare_step:.3f} of bare")


def _kernels(lines: Sequence[Line]) -> str:
    return _joined(lines, "kernels-", "{launches:g} launches, {step_ms:g} ms")


def _tests(lines: Sequence[Line]) -> str:
    return f"{lines[-1]['figures'].get('passed', 0)} passed"


def _resume(lines: Sequence[Line]) -> str:
    said = {True: "same bits", False: "other bits"}
    return "; ".join(
        f"{line['stage'].removeprefix('resume-')} {said[line['figures']['same_bits']]}"
        for line in lines
    )


def _lines(lines: Sequence[Line]) -> str:
    text = "time within {largest_time_error:.1%}, memory within {largest_memory_error:.1%}"
    return _joined(lines, "lines-", text)


def _largest(lines: Sequence[Line]) -> str:
    return _joined(lines, "largest-", "predicted {predicted}, runs {runs}")


def _two(lines: Sequence[Line]) -> str:
    return _joined(lines, "two-processes-", "losses within {largest_difference:.2%} of simulated")


def _killed(lines: Sequence[Line]) -> str:
    return _joined(lines, "killed-rank-", "named after {seconds:g} s")


def _training(lines: Sequence[Line]) -> str:
    accuracies: dict[str, list[float]] = {}
    for line in lines:
        name = line["stage"].partition("-")[2]
        name = (name.rpartition("-seed")[0] or name).removesuffix("-full") + _rate(line)
        if part := line["figures"].get("train_images"):
            name += f" ({part} images)"
        accuracies.setdefault(name, []).append(line["figures"]["final_accuracy"])
    return "; ".join(
        f"{name} {sum(values) / len(values):.2%}{f' (n={len(values)})' * (len(values) > 1)}"
        for name, values in accuracies.items()
    )


def _tuned(lines: Sequence[Line]) -> str:
    """Return the best rate of each arm."""
    arms: dict[str, list[Line]] = {}
    for line in lines:
        arms.setdefault(line["stage"].partition("-lr")[0], []).append(line)
    best = (max(own, key=lambda line: line["figures"]["final_accuracy"]) for own in arms.values())
    counts = (len(own) for own in arms.values())
    return "; ".join(
        f"{_training([one])}, best of {n}" for one, n in zip(best, counts, strict=True)
    )


def _joined(lines: Sequence[Line], prefix: str, text: str) -> str:
    found = []
    for line in lines:
        name = line["stage"].removeprefix(prefix)
        try:
            found.append(f"{name}: {text.format(**line['figures'])}")
        except (KeyError, TypeError, ValueError):  # a figure that could not be had
            found.append(f"{name}: {line['figures'].get('note', 'without all figures')}")
    return "; ".join(found)


ROWS = (
    Row("environment", 1, "The machine", _machine),
    Row("mode", 10, "Two epochs a mode", _modes),
    Row("speed", 12, "train.py, bare step", _speed),
    Row("kernels", 4, "Of a step", _kernels),
    Row("tests", 1, "Tests marked gpu", _tests),
    Row("resume", 4, "Stopped and resumed", _resume),
    Row("lines", 2, "Held-out batch sizes", _lines),
    Row("largest", 2, "Largest batch", _largest),
    Row("two-processes", 2, "Two processes, gloo", _two),
    Row("killed-rank", 2, "One of two processes killed", _killed),
    Row("tune", 10, "Rates, on held-out images", _tuned),
    Row("arm", 24, "The paper's arms", _training),
    Row("recipe", 6, "cifar100_best, control", _training),
    Row("conference", 6, "The conference paper's setting", _training),
)
