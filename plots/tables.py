"""Write the tables of README.md and docs/ from the CSV files in results/.

    python -m plots.tables            # write every table
    python -m plots.tables --check    # change nothing; name each table that differs, with status 1

A table stands between two lines of a page, ``<!-- table: NAME -->`` and ``<!-- end -->``. NAME is
one of ``TABLES``.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections.abc import Callable, Sequence
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
MARKED = re.compile(r"(<!-- table: (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)

Rows = list[dict[str, str]]

MINI = (
    *("all_large", "dual_1_k105", "dual_3_k105", "dual_4_k105", "dual_3_k110", "asp"),
    *("cyclic", "progressive", "hybrid"),
    *("all_large_rounds_4", "dual_3_rounds_4", "hybrid_rounds_4", "conventional", "small_alone"),
)
EQUAL_TIME = (
    *("all_large", "dual_3_k105", "dual_4_k105", "cyclic", "progressive", "hybrid"),
    *("all_large_rounds_4", "dual_3_rounds_4", "hybrid_rounds_4", "conventional", "small_alone"),
)
SUMMARY = {  # README's rows: arms of configs/mini, and what they are
    "all_large": "four workers, all on the large batch: the baseline",
    "dual_3_k105": "dual batch: three of four workers on small batches",
    "cyclic": "cyclic resolution, 24 and 32 px",
    "all_large_rounds_4": "the baseline with four merges an epoch",
    "hybrid_rounds_4": "dual batch and cyclic resolution, four merges an epoch",
    "conventional": "one worker, large batch",
}
BEYOND = {  # arms of configs/beyond, and how they are told
    "rounds_4": "`--rounds-per-epoch 4`",
    "delta": "the same with `--merge delta --outer-lr 0.7 --outer-momentum 0.5`",
    "lr_sqrt": "`--lr-scaling sqrt`",
    "lr_linear": "`--lr-scaling linear`",
    "cosine": "`--lr-schedule cosine`",
    "stage_cosine": "a cosine inside every stage (dropped)",
    "label_smoothing": "`--label-smoothing 0.1`",
    "ema (EMA)": "`--ema-decay 0.8`, the averaged weights",
    "mixup": "`--mixup 0.2`",
    "cutmix": "`--cutmix 1.0`",
    "noise_ratio": "small workers by the noise scale (dropped)",
}
STUDIES = {  # workloads of noise_scale.csv, in the table's order
    "digits/test_efficientnet_gn/sgd": "digits, test_efficientnet_gn, SGD",
    "digits/test_efficientnet_gn/nesterov": "digits, test_efficientnet_gn, Nesterov",
    "cifar100/test_resnet/nesterov": "CIFAR-100, 20 coarse classes, test_resnet, Nesterov",
}
SPEED = {  # rows of speed.csv's training part
    "train.py, 1 worker": "train.py, 1 worker",
    "train.py, 4 workers": "train.py, 4 simulated workers",
    "bare step": "bare step",
    "plain loop": "plain Accelerate loop, no loader processes",
    "plain loop, 2 loaders": "plain Accelerate loop, two loader processes",
    "timm's script": "timm's script",
}
SPEED_COLUMNS = (("24", "float32"), ("32", "float32"), ("24", "bf16"), ("32", "bf16"))


def read(path: Path) -> Rows:
    """Return the rows of a CSV file."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def fixed(number: str, digits: int, sign: str = "") -> str:
    """Return a number of a CSV file in decimals, halves rounded up; with `sign` "+" it has one."""
    step = Decimal(1).scaleb(-digits)
    return f"{Decimal(number).quantize(step, ROUND_HALF_UP):{sign}f}"


def table_lines(rows: Rows, configs: str) -> list[str]:
    """Return a results table in Markdown: a line for each row, linked to its config.

    Args:
        rows: Rows of ``arms.csv`` or ``equal_time.csv``.
        configs: Folder of the configs, from the page's place.
    """
    lines = [
        "| setup | accuracy, mean ± sd | n | over the baseline, 95 % | loss | epochs "
        "| workers' time | s/point | minutes |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        arm, _, averaged = row["arm"].partition(" ")
        name = f"[{arm}]({configs}/{arm}.yaml)" + (f" {averaged}" if averaged else "")
        gain = "baseline" if row["difference"] == "nan" else difference(row)
        cost = "" if row["cost_per_point_s"] == "nan" else f"{float(row['cost_per_point_s']):+.1f}"
        lines.append(
            f"| {name} | {accuracy(row)} | {row['seeds']} | {gain} | {float(row['loss']):.3f} "
            f"| {row['epochs']} | {float(row['train_time_s']):.1f} s | {cost} "
            f"| {float(row['minutes']):.1f} |"
        )
    return lines


def accuracy(row: dict[str, str]) -> str:
    """Return mean and standard deviation over the seeds, in percent."""
    return f"{float(row['accuracy']):.1f} ± {float(row['sd']):.1f} %"


def difference(row: dict[str, str]) -> str:
    """Return the difference to the baseline in points, with its 95 % interval."""
    return f"{float(row['difference']):+.1f} ± {float(row['difference_ci95']):.1f}"


def _arms(name: str, arms: Sequence[str], table: str = "arms") -> Rows:
    rows = {row["arm"]: row for row in read(RESULTS / name / f"{table}.csv")}
    return [rows[arm] for arm in arms]


def first_command(up: str) -> list[str]:
    """Return the result of README's first command."""
    (row,) = read(RESULTS / "digits/arms.csv")
    return [
        "| digits, two CPU cores, torch 2.15 | accuracy at the last epoch | minutes |",
        "|---|---|---|",
        f"| [the first command]({up}configs/digits/first_command.yaml), {row['seeds']} seeds "
        f"([CSV]({up}results/digits/arms.csv)) | {accuracy(row)} (sd) "
        f"| {float(row['minutes']):.1f}, the first time half a minute more |",
    ]


def summary(up: str) -> list[str]:
    """Return README's six rows."""
    lines = [
        "| setup, 20 epochs, three seeds | accuracy, mean ± sd | over the baseline, 95 % "
        "| workers' time |",
        "|---|---|---|---|",
    ]
    for row in _arms("mini", tuple(SUMMARY)):
        arm = row["arm"]
        gain = "" if row["difference"] == "nan" else difference(row)
        lines.append(
            f"| [{SUMMARY[arm]}]({up}configs/mini/{arm}.yaml) | {accuracy(row)} | {gain} "
            f"| {float(row['train_time_s']):.1f} s |"
        )
    return lines


def mini(up: str) -> list[str]:
    """Return the main arms of configs/mini."""
    return table_lines(_arms("mini", MINI), f"{up}configs/mini")


def equal_time(up: str) -> list[str]:
    """Return the arms of configs/mini that ran as long as the baseline."""
    return table_lines(_arms("mini", EQUAL_TIME, "equal_time"), f"{up}configs/mini")


def vit(up: str) -> list[str]:
    """Return the arms of configs/vit."""
    return table_lines(read(RESULTS / "vit/arms.csv"), f"{up}configs/vit")


def beyond(up: str) -> list[str]:
    """Return what each addition to the hybrid gained on two workloads."""
    both = [
        {row["arm"]: row for row in read(RESULTS / name / "arms.csv")}
        for name in ("beyond", "beyond_imagenette")
    ]
    return [
        "| | CIFAR-100, 20 classes | Imagenette |",
        "|---|---|---|",
        f"| hybrid, the reference | {' | '.join(accuracy(rows['hybrid']) for rows in both)} |",
        *(
            f"| {text} | {' | '.join(difference(rows[arm]) for rows in both)} |"
            for arm, text in BEYOND.items()
        ),
    ]


def studies(up: str) -> list[str]:
    """Return what the batch-size studies and the noise scale say."""
    lines = [
        "| workload (networks of timm's, 0.1 and 0.4 M parameters) | perfect scaling up to "
        "| maximum useful batch | critical batch | noise scale at the goal, ± sd |",
        "|---|---|---|---|---|",
    ]
    rows = {row["workload"]: row for row in read(RESULTS / "noise_scale.csv")}
    for workload, text in STUDIES.items():
        row = rows[workload]
        useful = row["useful_batch_size"]
        if row["useful_is_seen"] != "True":
            useful += ", the largest tried"
        lines.append(
            f"| {text}, error < {100 * float(row['goal_error']):.0f} % "
            f"| {row['perfect_scaling_up_to']} | {useful} | {fixed(row['critical_batch_size'], 0)} "
            f"| {row['noise_scale_at_goal']} ± {fixed(row['sd'], 0)} "
            f"({row['seeds_at_goal']} seeds) |"
        )
    return lines


def uneven(up: str) -> list[str]:
    """Return what balancing gained on uneven and disturbed machines."""
    slowed = {row["sync"]: row for row in read(RESULTS / "slowed.csv")}
    balance = {
        (row["case"].partition(" ")[0], row["epoch_noise"], row["balance"]): row
        for row in read(RESULTS / "balance.csv")
    }
    disturbed = {
        (row["model"], row["balance"], row["min_batch_size"]): row
        for row in read(RESULTS / "disturbed.csv")
    }

    def percent(number: str) -> str:
        return f"{fixed(str(Decimal(number) * 100), 0)} %"

    def idle(column: str) -> str:
        return " / ".join(percent(slowed[sync][column]) for sync in ("step", "bsp"))

    ratios = " / ".join(fixed(slowed[sync]["ratio"], 2) for sync in ("step", "bsp"))
    even, even_dbs = (balance["speeds", "0.0", rule] for rule in ("dynamic", "dbs"))
    noisy, noisy_dbs = (balance["speeds", "0.1", rule] for rule in ("dynamic", "dbs"))
    still, moved, moved_dbs = (
        balance["disturbed", "0.02", rule] for rule in ("none", "dynamic", "dbs")
    )
    group, group_equal = (
        disturbed["test_efficientnet_gn", rule, "2"] for rule in ("dynamic", "none")
    )
    batch, batch_equal = (disturbed["test_resnet", rule, "2"] for rule in ("dynamic", "none"))
    batch_8 = disturbed["test_resnet", "dynamic", "8"]

    def time(row: dict[str, str]) -> str:
        return fixed(row["time_to_equal_split"].partition(" ")[0], 2)

    def loss(row: dict[str, str], digits: int) -> str:
        mean, half = row["loss_less_equal_split_95"].split(" +- ")
        return f"{fixed(mean, digits, '+')} ± {fixed(half, digits)}"

    changes = round(float(moved_dbs["changes_in_50_median"]) / float(moved["changes_in_50_median"]))
    return [
        "| measured here | against the equal split |",
        "|---|---|",
        "| two real processes, one slowed 3x, ResNet-18 on digits: epoch time with `step` / with "
        f"`bsp` ([slowed.csv]({up}results/slowed.csv)) | {ratios} of it; "
        f"idle {idle('idle_before')} before, {idle('idle_after')} after |",
        "| speeds 1, 2, 4 with a fixed cost of a step: slowest over mean step time "
        f"([balance.csv]({up}results/balance.csv)) | {fixed(even['imbalance_epoch_1'], 2)} at "
        f"first, {fixed(even['imbalance_epoch_3'], 2)} after two epochs, "
        f"{fixed(even['imbalance_11_to_50'], 2)} in the end, "
        f"{fixed(even['changes_in_50_median'], 0)} changes (`dbs`: "
        f"{fixed(even_dbs['imbalance_epoch_3'], 2)} and "
        f"{fixed(even_dbs['imbalance_11_to_50'], 2)}, "
        f"{fixed(even_dbs['changes_in_50_median'], 0)} changes) |",
        "| the same with 10 % noise on each epoch's times, 100 seeds that the rule was not tuned "
        f"on | {fixed(noisy['imbalance_11_to_50'], 2)} on average from epoch 11 on, below 1.05 in "
        f"{percent(noisy['below_1.05_11_to_50'])} of these epochs, "
        f"{fixed(noisy['changes_in_50_median'], 0)} changes in 50 epochs (`dbs`: "
        f"{fixed(noisy_dbs['imbalance_11_to_50'], 2)}, "
        f"{percent(noisy_dbs['below_1.05_11_to_50'])}, "
        f"{fixed(noisy_dbs['changes_in_50_median'], 0)} changes) |",
        f"| disturbance test, four workers, slowed 2x at random | time {time(moved)} (`dbs`: "
        f"{time(moved_dbs)} with {changes} times the changes), utilisation "
        f"{percent(still['utilisation'])[:-2]} -> {percent(moved['utilisation'])} |",
        "| the same at 3x with training, 3 seeds, a model without batch norm "
        f"([disturbed.csv]({up}results/disturbed.csv)) | time {time(group)}, last loss "
        f"{loss(group, 2)} (95 %) beside {fixed(group_equal['last_loss'], 3)}: no difference seen, "
        "and a wide interval |",
        "| the same, a model with batch norm and 16 samples a worker at first | time "
        f"{time(batch)}, but accuracy {percent(batch['accuracy'])[:-2]} instead of "
        f"{percent(batch_equal['accuracy'])}: see batch norm below |",
        f"| the same with `--min-batch-size 8` | time {time(batch_8)}, last loss "
        f"{loss(batch_8, 3)} beside {fixed(batch_equal['last_loss'], 3)}: no difference seen |",
    ]


def speed(up: str) -> list[str]:
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
        lines.append(f"| {text} | {' | '.join(cells)} | {memory[0]} to {memory[-1]} |")
    return lines


def workers(up: str) -> list[str]:
    """Return seconds of an epoch by the number of workers, simulated and real."""
    rows = {
        (*row["what"].split(", "), row["workers"]): fixed(row["median"], 1)
        for row in read(RESULTS / "speed.csv")
        if row["part"] == "workers"
    }
    counts = [("simulated", n) for n in ("1", "256", "1000")] + [("real", n) for n in "1248"]
    return [
        "| seconds | simulated: 1 worker | 256 | 1,000 | real processes: 1 | 2 | 4 | 8 |",
        "|---|---|---|---|---|---|---|---|",
        *(
            f"| `{sync}` | {' | '.join(rows[sync, kind, count] for kind, count in counts)} |"
            for sync in ("bsp", "asp")
        ),
    ]


def operators(up: str) -> list[str]:
    """Return the operators of a training step."""
    return [
        "| | operators that compute, a step | views and allocations |",
        "| --- | --- | --- |",
        *(
            f"| {row['precision']}, {row['resolution']} px | {row['computing']} "
            f"| {fixed(row['views_and_allocations'], 0)} |"
            for row in read(RESULTS / "operators.csv")
        ),
    ]


def gpu(up: str) -> list[str]:
    """Return what has run on which GPU."""
    from benchmarks.gpu.table import table

    return table(sorted((RESULTS / "gpu").glob("*.jsonl"))).splitlines()


def timm_options(up: str) -> list[str]:
    """Return timm's training options, what each is here, and which share is there."""
    rows = read(RESULTS / "timm_options.csv")
    there = sum(bool(row["here"]) for row in rows)
    flags = sum(row["here"].startswith("--") for row in rows)
    return [
        f"{there} of {len(rows)} options ({100 * there / len(rows):.0f} %): {flags} by a flag, "
        f"{there - flags} are always on.",
        "",
        "| timm | here | |",
        "|---|---|---|",
        *(f"| `{row['option']}` | {_as_code(row['here'])} | {row['note']} |" for row in rows),
    ]


def _as_code(text: str) -> str:
    return f"`{text}`" if text.startswith("--") else text or "no"


TABLES: dict[str, Callable[[str], list[str]]] = {
    function.__name__: function
    for function in (
        *(first_command, summary, mini, equal_time, beyond, vit),
        *(studies, uneven, speed, workers, operators, gpu, timm_options),
    )
}


def pages() -> list[Path]:
    """Return the pages that may have tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def with_tables(text: str, up: str) -> str:
    """Return a page with each of its tables as the CSV files have it.

    Args:
        text: The page.
        up: Way from the page's folder to the repository's root: "" or "../".

    Raises:
        ValueError: If a table has no end, or a name that is not one of ``TABLES``.
    """

    def written(found: re.Match[str]) -> str:
        begin, name, _, end = found.groups()
        if name not in TABLES:
            raise ValueError(f"table must be one of {', '.join(TABLES)}, got {name}")
        return begin + "\n".join(TABLES[name](up)) + "\n" + end

    if text.count("<!-- table: ") != len(MARKED.findall(text)):
        raise ValueError("each table must end in a line <!-- end -->")
    return MARKED.sub(written, text)


def main(argv: Sequence[str] | None = None) -> None:
    """Write the tables, or check them."""
    parser = argparse.ArgumentParser(prog="python -m plots.tables", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--check", action="store_true", help="write nothing; fail if any differs")
    check = parser.parse_args(argv).check
    different = 0
    for page in pages():
        text = page.read_text(encoding="utf-8")
        try:
            new = with_tables(text, "" if page.parent == ROOT else "../")
        except ValueError as error:
            sys.exit(f"error: {page.relative_to(ROOT)}: {error}")
        for old, now in zip(MARKED.finditer(text), MARKED.finditer(new), strict=True):
            if old[3] != now[3]:
                different += 1
                verb = "differs from its CSV file" if check else "written"
                print(f"{page.relative_to(ROOT)}: table {old[2]} {verb}")
        if not check and new != text:
            page.write_text(new, encoding="utf-8")
    if check and different:
        sys.exit("error: run python -m plots.tables")


if __name__ == "__main__":
    main()
