"""Write the tables whose programs are run again: speed, and the library in other loops.

    python -m experiments.plots.tables          # write every table
    python -m experiments.plots.tables --check  # write nothing; name what differs, status 1

A table stands between two lines of a page, ``<!-- table: NAME -->`` and ``<!-- end -->``. All other
tables are frozen, as their rows are: `experiments.recompute` holds their figures.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from experiments.plots.rows import RESULTS, ROOT, fixed, read, with_interval

SPEED = {  # rows of speed.csv's training part
    "train.py, 1 worker": "train.py, 1 worker",
    "train.py, 4 workers": "train.py, 4 simulated workers",
    "bare step": "bare step",
    "plain loop": "plain Accelerate loop, no loader processes",
    "plain loop, 2 loaders": "plain Accelerate loop, two loader processes",
    "timm's script": "timm's script",
}
SPEED_COLUMNS = (("24", "float32"), ("32", "float32"), ("24", "bf16"), ("32", "bf16"))


def speed() -> list[str]:
    """Return images a second of train.py and of what it is compared with."""
    rows = {
        (row["what"], row["resolution"], row["precision"]): row
        for row in read(RESULTS / "speed.csv")
        if row["part"] == "training"
    }
    lines = [
        "| images/s (train.py over it) | 24 px, float32 | 32 px, float32 | 24 px, bf16 "
        "| 32 px, bf16 | peak memory, MiB |",
        "|---|---|---|---|---|---|",
    ]
    for what, text in SPEED.items():
        own = [rows[(what, *column)] for column in SPEED_COLUMNS]
        cells = [fixed(row["median"], 1) for row in own]
        if text != "train.py, 1 worker":
            ratios = [fixed(row["train.py_over_it"], 2) for row in own]
            cells = [f"{cell} ({ratio})" for cell, ratio in zip(cells, ratios, strict=True)]
        memory = sorted(int(row["peak_mib"]) for row in own)
        # The plain loop's peak is from its set-up.
        peak = "" if text.startswith("plain") else f"{memory[0]} to {memory[-1]}"
        lines.append(f"| {text} | {' | '.join(cells)} | {peak} |")
    return lines


def own_loop() -> list[str]:
    """Return what the library costs and gains in loops other than train.py's."""
    burden, merges = (read(RESULTS / f"own_loop/{name}.csv") for name in ("burden", "merges"))
    (cost,) = read(RESULTS / "own_loop/overhead.csv")
    dynamic, equal = (
        with_interval([float(row["epoch_s"]) for row in burden if row["arm"] == arm], 2)
        for arm in ("dynamic", "equal")
    )
    merge_ms = {
        way: with_interval([1e3 * float(row["merge_s"]) for row in merges if row["way"] == way], 0)
        for way in ("Rounds", "Rounds, outer", "LocalSGD", "DiLoCo")
    }
    half = 100 * float(cost["half_interval"])
    return [
        "| two processes, 95 % | with `dbsl` | without |",
        "|---|---|---|",
        f"| [a step of DDP](overhead.csv), ms: sampler, `scale` and `watch` "
        f"({float(cost['added_us']) / 1e3:.3f} ms by themselves; noise ± {half:.1f} %) "
        f"| {fixed(cost['library_ms'], 1)} | {fixed(cost['plain_ms'], 1)} |",
        f"| [an epoch of BERT](burden.csv), s, one core shared with another program: "
        f'`balance="dynamic"`, equal batches | {dynamic} | {equal} |',
        f"| [a merge](merges.csv) of {int(merges[0]['weights']) / 1e6:.1f} M weights, ms: "
        f"`Rounds`, Accelerate's `LocalSGD` | {merge_ms['Rounds']} | {merge_ms['LocalSGD']} |",
        f"| the same with an outer step: `Rounds(outer=...)`, torchft's `DiLoCo` "
        f"| {merge_ms['Rounds, outer']} | {merge_ms['DiLoCo']} |",
    ]


TABLES: dict[str, tuple[str, Callable[[], list[str]]]] = {  # with their pages
    "speed": ("docs/speed.md", speed),
    "own_loop": ("experiments/results/own_loop/README.md", own_loop),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Write the tables, or check them."""
    parser = argparse.ArgumentParser(prog="python -m experiments.plots.tables", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--check", action="store_true", help="write nothing; fail if any differs")
    check, different = parser.parse_args(argv).check, 0
    for name, (page, rows) in TABLES.items():
        text, lines = (ROOT / page).read_text("utf-8"), "\n".join(rows())
        begin, end = f"<!-- table: {name} -->\n", "\n<!-- end -->"
        before, found, after = text.partition(begin)
        table_now, closed, rest = after.partition(end)
        if not (found and closed):
            sys.exit(f"error: {page} must have a table {name}, up to <!-- end -->")
        if table_now == lines:
            continue
        different += 1
        print(f"{page}: table {name} {'differs from its rows' if check else 'written'}")
        if not check:
            (ROOT / page).write_text(before + begin + lines + end + rest, encoding="utf-8")
    if check and different:
        sys.exit("error: run python -m experiments.plots.tables")


if __name__ == "__main__":
    main()
