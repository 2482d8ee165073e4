"""Tables of time: uneven machines, links, speed; and what has run on GPUs."""

from __future__ import annotations

import statistics
from decimal import Decimal

from dbsl.extras.emulate import EmulatedLink
from experiments.benchmarks.demos import hybrid
from experiments.plots.links import DDP, links_against
from experiments.plots.quotas import quotas_against
from experiments.plots.rows import RESULTS, fixed, read, with_interval

DEMO_UNEVEN = {  # arms of results/demos/uneven.csv
    DDP: "plain DDP: the loop of Accelerate's documentation",
    "equal": "`train.py --sync step`, equal parts",
    "balanced": "`train.py --sync step --balance dynamic`",
}
DEMO_HYBRID = {  # arms of experiments.benchmarks.demos.hybrid
    "ddp": "`train.py --sync step`",
    "cyclic": "`--sync step`, resolutions cycling",
    "hybrid": "hybrid: one of two workers small, four merges an epoch, resolutions cycling",
}
ISLANDS = {  # arms of experiments.benchmarks.demos.islands
    "step": "`--sync step`: all four processes, 128 samples a step",
    "workers": "`--rounds-per-epoch 8`: four workers, 32 samples a step",
    "islands": "the same and `--worker-processes 2`: two workers, 64 samples a step",
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
_ROUND_S = 10  # the rounds that a server is held against
SPEED_COLUMNS = (("24", "float32"), ("32", "float32"), ("24", "bf16"), ("32", "bf16"))


def demo_uneven(up: str) -> list[str]:
    """Return two processes of which one shares its core: seconds of an epoch, accuracy."""
    rows = read(RESULTS / "demos/uneven.csv")
    control = {row["turn"]: float(row["epoch_s"]) for row in rows if row["arm"] == DDP}
    lines = [
        "| two processes, another program on the second one's core "
        f"([CSV]({up}results/demos/uneven.csv)) | s/epoch | over plain DDP's | accuracy, % |",
        "|---|---|---|---|",
    ]
    for arm, text in DEMO_UNEVEN.items():
        own = [row for row in rows if row["arm"] == arm]
        seconds = [float(row["epoch_s"]) for row in own]
        ratios = [float(row["epoch_s"]) / control[row["turn"]] for row in own]
        accuracies = [100 * float(row["accuracy"]) for row in own]
        ratio = "1" if arm == DDP else with_interval(ratios, 2)
        lines.append(
            f"| {text} | {with_interval(seconds, 2)} | {ratio} | {with_interval(accuracies, 1)} |"
        )
    return lines


def seconds(up: str) -> list[str]:
    """Return README's rows: training time and accuracy next to a control's, turn by turn."""
    lines = [
        "| two processes on two cores: what ran, its control | training time over the control's "
        "| points over it | seeds | epochs |",
        "|---|---|---|---|---|",
    ]
    for case in (*quotas_against(), *links_against()):
        lines.append(
            f"| {case.text} ([rows]({up}results/{case.rows})) | {with_interval(case.ratios, 2)} "
            f"| {with_interval(case.points, 1, '+')} | {len(case.points)} | {case.epochs} |"
        )
    return lines


def demo_hybrid(up: str) -> list[str]:
    """Return two processes that cycle resolutions, with joint steps and in rounds."""
    rows = read(RESULTS / "demos/hybrid.csv")
    lines = [
        f"| two processes on two cores ([CSV]({up}results/demos/hybrid.csv)) | s of training "
        "| over joint steps' | accuracy, % | less joint steps', points | at least, 95 % | turns |",
        "|---|---|---|---|---|---|---|",
    ]
    for model in dict.fromkeys(row["model"] for row in rows):
        versus = hybrid.compare(rows, model)
        for arm, text in DEMO_HYBRID.items():
            own = [row for row in rows if (row["arm"], row["model"]) == (arm, model)]
            seconds = with_interval([float(row["train_s"]) for row in own], 1)
            accuracies = with_interval([100 * float(row["accuracy"]) for row in own], 1)
            ratio, less, low = "1", "", ""
            if arm in versus:
                found = versus[arm]
                ratio, less = with_interval(found.ratios, 2), with_interval(found.less, 1, "+")
                low = f"{found.low:+.1f}"
            lines.append(
                f"| {model}, {text} | {seconds} | {ratio} | {accuracies} | {less} | {low} "
                f"| {len(own)} |"
            )
    return lines


def server_limits(up: str) -> list[str]:
    """Return how many workers one server carries, by its processor and by its link."""
    rows = read(RESULTS / "server_scale.csv")
    lines = [
        f"| model | MB each way | merge alone, ms | server's CPU, ms a push and pull, at most | "
        f"workers, in rounds of {_ROUND_S} s: on one core | on 10 Gb/s | on 1 Gb/s |",
        "|---|---|---|---|---|---|---|",
    ]
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        size = int(own[0]["bytes"]) / 2
        merge_s = statistics.median(float(row["merge_s"]) for row in own)
        cpu_s = max(float(row["server_cpu_s"]) for row in own)
        cells = [_in_millions(own[0]), f"{size / 1e6:.1f}", f"{1000 * merge_s:.2g}"]
        cells.append(f"{1000 * cpu_s:.2g}")
        costs = (cpu_s, EmulatedLink(10.0).message_s(size), EmulatedLink(1.0).message_s(size))
        cells += [f"{int(_ROUND_S / cost):,}" for cost in costs]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def link_check(up: str) -> list[str]:
    """Return predicted over real seconds of an epoch on a shaped link."""
    rows = read(RESULTS / "demos/link_check.csv")
    rates = list(dict.fromkeys(row["megabits"] for row in rows))
    ratios = {  # of the seconds: the file's own ratio is rounded, and would be rounded twice
        (row["sync"], row["megabits"]): Decimal(row["predicted_epoch_s"])
        / Decimal(row["real_epoch_s"])
        for row in rows
    }
    return [
        f"| predicted over real s/epoch ([CSV]({up}results/demos/link_check.csv)) | "
        + " | ".join(f"{float(rate):,.0f} Mb/s" for rate in rates)
        + " |",
        "|---|" + "---|" * len(rates),
        *(
            f"| {sync} | {' | '.join(fixed(str(ratios[sync, rate]), 2) for rate in rates)} |"
            for sync in dict.fromkeys(row["sync"] for row in rows)
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

    return [
        "| measured here | against the equal split |",
        "|---|---|",
        "| two processes, one slowed 3x, ResNet-18 on digits: epoch time with `step` / with "
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
        "| disturbance test, four workers slowed 3x at random, 3 seeds, a model without batch norm "
        f"([disturbed.csv]({up}results/disturbed.csv)) | time {time(group)}, last loss "
        f"{loss(group, 2)} (95 %) against {fixed(group_equal['last_loss'], 3)}: no difference "
        "seen, and a wide interval |",
        "| the same, a model with batch norm and 16 samples a worker at first | time "
        f"{time(batch)}, but accuracy {percent(batch['accuracy'])[:-2]} instead of "
        f"{percent(batch_equal['accuracy'])}: see batch norm below |",
        f"| the same with `--min-batch-size 8` | time {time(batch_8)}, last loss "
        f"{loss(batch_8, 3)} against {fixed(batch_equal['last_loss'], 3)}: no difference seen |",
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
        # The plain loop's peak is from its set-up.
        peak = "" if text.startswith("plain") else f"{memory[0]} to {memory[-1]}"
        lines.append(f"| {text} | {' | '.join(cells)} | {peak} |")
    return lines


def gpu(up: str) -> list[str]:
    """Return what has run on which GPU."""
    from experiments.benchmarks.gpu.table import table

    return table(sorted((RESULTS / "gpu").glob("*.jsonl"))).splitlines()


def islands(up: str) -> list[str]:
    """Return two machines of two processes each: seconds and accuracy of what they share."""
    rows = read(RESULTS / "islands/islands.csv")
    lines = [
        f"| two machines of two processes, 100 Mb/s ([CSV]({up}results/islands/islands.csv)) "
        "| s/epoch once warm | s of training | accuracy, % |",
        "|---|---|---|---|",
    ]
    for arm, text in ISLANDS.items():
        own = [row for row in rows if row["arm"] == arm]
        epoch_s, train_s = ([float(row[name]) for row in own] for name in ("epoch_s", "train_s"))
        accuracy = with_interval([100 * float(row["accuracy"]) for row in own], 1)
        cells = (text, with_interval(epoch_s, 2), with_interval(train_s, 1), accuracy)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _in_millions(row: dict[str, str]) -> str:
    return f"{int(row['parameters']) / 1e6:.1f} M parameters"


def own_loop(up: str) -> list[str]:
    """Return what the library costs and gains in loops other than train.py's."""
    folder = f"{up}results/own_loop"
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
        f"| [a step of DDP]({folder}/overhead.csv), ms: sampler, `scale` and `watch` "
        f"({float(cost['added_us']) / 1e3:.3f} ms by themselves; noise ± {half:.1f} %) "
        f"| {fixed(cost['library_ms'], 1)} | {fixed(cost['plain_ms'], 1)} |",
        f"| [an epoch of BERT]({folder}/burden.csv), s, one core shared with another program: "
        f'`balance="dynamic"`, equal batches | {dynamic} | {equal} |',
        f"| [a merge]({folder}/merges.csv) of {int(merges[0]['weights']) / 1e6:.1f} M weights, ms: "
        f"`Rounds`, Accelerate's `LocalSGD` | {merge_ms['Rounds']} | {merge_ms['LocalSGD']} |",
        f"| the same with an outer step: `Rounds(outer=...)`, torchft's `DiLoCo` "
        f"| {merge_ms['Rounds, outer']} | {merge_ms['DiLoCo']} |",
    ]
