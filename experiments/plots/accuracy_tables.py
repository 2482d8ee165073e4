"""Tables of accuracies: arms of configs/ over seeds."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.plots.rows import RESULTS, Rows, read

MINI = (
    *("all_large", "ddp_128", "ddp_256"),
    *("dual_1_k105", "dual_3_k105", "dual_4_k105", "dual_3_k110", "asp"),
    *("cyclic", "progressive", "hybrid"),
    *("all_large_rounds_4", "dual_3_rounds_4", "hybrid_rounds_4", "conventional", "small_alone"),
)
EQUAL_TIME = (
    *("all_large", "ddp_128", "ddp_256", "dual_3_k105", "dual_4_k105"),
    *("cyclic", "progressive", "hybrid"),
    *("all_large_rounds_4", "dual_3_rounds_4", "hybrid_rounds_4", "conventional", "small_alone"),
)
VIT = ("all_large", "ddp_128", "cyclic", "hybrid")
BEYOND = {  # arms of experiments/configs/beyond, and how they are told
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
    """Return the rows of arms; those of data parallelism ran later, beside the same baseline."""
    files = (RESULTS / name / f"ddp/{table}.csv", RESULTS / name / f"{table}.csv")
    rows = {row["arm"]: row for path in files for row in read(path)}  # the first baseline's stays
    return [rows[arm] for arm in arms]


def first_command(up: str) -> list[str]:
    """Return the result of README's first command."""
    (row,) = read(RESULTS / "digits/arms.csv")
    return [
        "| digits, two CPU cores with bf16, torch 2.15 | accuracy at the last epoch | minutes |",
        "|---|---|---|",
        f"| [the first command]({up}configs/digits/first_command.yaml), {row['seeds']} seeds "
        f"([CSV]({up}results/digits/arms.csv)) | {accuracy(row)} (sd) "
        f"| {float(row['minutes']):.1f} |",
    ]


def mini(up: str) -> list[str]:
    """Return the main arms of experiments/configs/mini."""
    return table_lines(_arms("mini", MINI), f"{up}configs/mini")


def equal_time(up: str) -> list[str]:
    """Return the arms of experiments/configs/mini that ran as long as the baseline."""
    return table_lines(_arms("mini", EQUAL_TIME, "equal_time"), f"{up}configs/mini")


def vit(up: str) -> list[str]:
    """Return the arms of experiments/configs/vit."""
    return table_lines(_arms("vit", VIT), f"{up}configs/vit")


def beyond(up: str) -> list[str]:
    """Return what each addition to the hybrid gained on two workloads."""
    names = ("beyond", "beyond_imagenette")
    both = [{row["arm"]: row for row in read(RESULTS / name / "arms.csv")} for name in names]
    controls = [
        _arms(name, [arm])[0] for name, arm in zip(names, ("ddp_128", "ddp_64"), strict=True)
    ]
    return [
        "| | CIFAR-100, 20 classes | Imagenette |",
        "|---|---|---|",
        f"| hybrid, the reference | {' | '.join(accuracy(rows['hybrid']) for rows in both)} |",
        "| plain data parallelism, 128 and 64 samples a step, no link cost "
        f"| {' | '.join(map(difference, controls))} |",
        *(
            f"| {text} | {' | '.join(difference(rows[arm]) for rows in both)} |"
            for arm, text in BEYOND.items()
        ),
    ]
