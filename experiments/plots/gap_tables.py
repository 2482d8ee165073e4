"""Tables of configs/gap and configs/causes: arms, and hypotheses registered before they ran."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from dbsl.tools.compare.statistics import Estimate, holm, interval
from experiments.plots.evidence import TUNED_LATER
from experiments.plots.rows import RESULTS, Rows, read, shown_p, with_interval

ARMS = {  # those of experiments/configs/gap, and what they are
    "all_large": "four workers, all on the large batch: the baseline",
    "all_large-lr1.6": "the same at twice its learning rate",
    "dual_1": "dual batch: one of four workers on small batches",
    TUNED_LATER: "the same at a rate of its own, after the fact",
    "dual_2": "dual batch: two of four",
    "dual_3": "dual batch: three of four",
    "dual_4": "all four on small batches",
    "hybrid": "`dual_3`, resolutions cycling",
    "cyclic": "the baseline, resolutions cycling",
    "all_large_rounds_4": "the baseline, four merges an epoch",
    "ddp_128": "data parallelism, 128 samples a step, no link cost",
    "ddp_256": "256 samples a step",
    "ddp_512": "512 samples a step",
    "ddp_128_1gbps": "128 samples a step, on a link of 1 Gb/s",
    "ddp_256_1gbps": "256 samples a step, on that link",
    "ddp_512_1gbps": "512 samples a step, on that link",
    "alone_32": "one worker, 32 samples a step",
    "alone_128": "one worker, 128 samples a step",
    "alone_250": "one worker, 250 samples a step",
    "alone_512": "one worker, 512 samples a step",
}
SUMMARY = {  # README's rows
    "dual_3": "dual batch: three of four workers on small batches",
    "dual_4": "small batches on all four",
    "hybrid": "dual batch, resolutions cycling",
    "all_large_rounds_4": "four merges an epoch, large batches of 156, not 250",
    "ddp_128": "plain data parallelism, links without cost",
    "ddp_128_1gbps": "the same at 1 Gb/s, no overlap or compression",
}
AFTER = RESULTS / "gap/after/arms_runs.csv"  # thought of when the results were known
FIXED_RATE = RESULTS / "gap/fixed_rate/arms_runs.csv"


@dataclass(frozen=True)
class Hypothesis:
    """That one arm is better than another one by more than a margin.

    Attributes:
        name: As in the README.md of the configs.
        arm: The arm.
        other: The arm that it is compared with.
        margin: Points that the difference is tested against.
        together: Whether Holm's correction takes it with the others.
    """

    name: str
    arm: str
    other: str
    margin: float = 0.0
    together: bool = True


MORE_SEEDS = Hypothesis("After the fact", "dual_3", "ddp_128_1gbps", together=False)
HYPOTHESES = (
    Hypothesis("H1", "dual_3", "all_large"),
    Hypothesis("H2", "dual_3", "dual_4"),
    Hypothesis("H3", "dual_3", "ddp_128"),
    Hypothesis("H3, 1 Gb/s", "dual_3", "ddp_128_1gbps", together=False),
    Hypothesis("H4", "hybrid", "dual_3", margin=-1.0),
)
CAUSES = (  # families, each corrected for itself
    (
        Hypothesis("C1", "all_large_156", "all_large"),
        Hypothesis("C2", "all_large_rounds_4", "all_large_156"),
        Hypothesis("C3", "all_large_rounds_8", "all_large_rounds_4"),
        Hypothesis("C4", "dual_3_rounds_4", "dual_4_rounds_4"),
        Hypothesis("C5", "dual_3_rounds_8", "dual_4_rounds_8"),
    ),
    (
        Hypothesis("N1", "alone_512_ghost", "alone_512"),
        Hypothesis("N2", "alone_512_long", "alone_512"),
        Hypothesis("N3", "dual_3_anew (EMA)", "dual_3_anew"),
        Hypothesis("N4", "dual_3_anew (EMA)", "all_large_anew (EMA)"),
    ),
    (
        Hypothesis("P1", "dual_3_asp_ratio", "all_large_asp_ratio"),
        Hypothesis("P2", "dual_3_asp_half", "all_large_asp_half"),
    ),
)


def tested(
    accuracy: Mapping[str, Mapping[int, float]], registered: Sequence[Hypothesis]
) -> list[tuple[Hypothesis, Estimate, float]]:
    """Return each hypothesis that two or more seeds tell of, its difference in points, and its p.

    The interval is that of the difference; p is that it is the margin, by a two-sided t-test, after
    Holm's correction where that takes it. Hypotheses without runs count with a p of 1.

    Args:
        accuracy: Of each arm and seed, in percent.
        registered: All that the correction is for.
    """
    found, missing = [], 0
    for each in registered:
        one, other = accuracy.get(each.arm, {}), accuracy.get(each.other, {})
        seeds = sorted(one.keys() & other.keys())
        if len(seeds) < 2:
            missing += each.together
            continue
        differences = [one[seed] - other[seed] for seed in seeds]
        p = interval([value - each.margin for value in differences]).p
        found.append((each, interval(differences), p))
    together = holm([*(p for each, _, p in found if each.together), *[1.0] * missing])
    corrected = iter(together)
    return [(each, i, next(corrected) if each.together else p) for each, i, p in found]


def hypotheses(up: str) -> list[str]:
    """Return what the registered runs of configs/gap say of each hypothesis."""
    head = f"[rows]({up}results/gap/arms_runs.csv)"
    found = tested(_accuracy(_runs()), HYPOTHESES)
    return _verdicts(head, found + tested(_accuracy(_runs() + read(AFTER)), [MORE_SEEDS]))


def causes(up: str) -> list[str]:
    """Return what the runs of configs/causes, and those of configs/gap, say of each hypothesis."""
    head = f"rows: [causes]({up}results/causes/arms_runs.csv), [gap]({up}results/gap/arms_runs.csv)"
    runs = _runs() + read(RESULTS / "causes/arms_runs.csv")
    accuracy = _accuracy(runs)
    return _verdicts(head, [found for family in CAUSES for found in tested(accuracy, family)])


def _verdicts(head: str, found: Sequence[tuple[Hypothesis, Estimate, float]]) -> list[str]:
    lines = [f"| ({head}) | difference, points, 95 % | seeds | p, corrected |", "|---|---|---|---|"]
    for each, estimate, p in found:
        against = f" (against {each.margin:+g})" if each.margin else ""
        alone = "" if each.together else " (not corrected)"
        lines.append(
            f"| {each.name}: `{each.arm}` minus `{each.other}` | {estimate.mean:+.1f} ± "
            f"{estimate.half:.1f} | {estimate.count} | {shown_p(p)}{against}{alone} |"
        )
    return lines


def gap(up: str) -> list[str]:
    """Return the arms of experiments/configs/gap that have run."""
    runs = _runs() + [row for row in read(AFTER) if row["arm"] == TUNED_LATER]
    accuracy, baseline = _accuracy(runs), _accuracy(runs).get("all_large", {})
    lines = [
        f"| ([rows]({up}results/gap/arms_runs.csv)) | accuracy, 95 % | over the baseline, 95 % "
        "| seeds | training images right | epochs | workers' time |",
        "|---|---|---|---|---|---|---|",
    ]
    for arm, text in ARMS.items():
        own = [row for row in runs if row["arm"] == arm]
        if not own:
            continue
        gain = _less(accuracy[arm], baseline) if arm != "all_large" else ""
        trained, time_s = (
            fmean(float(row[name]) for row in own) for name in ("train_accuracy", "train_time_s")
        )
        lines.append(
            f"| [{arm}]({up}configs/gap/{arm.partition('-')[0]}.yaml): {text} "
            f"| {with_interval(list(accuracy[arm].values()), 1)} % | {gain} | {len(own)} "
            f"| {trained:.1f} % | {own[0]['epochs']} | {time_s:.1f} s |"
        )
    return lines


def summary(up: str) -> list[str]:
    """Return README's rows: what is gained over four large batches, and in which time."""
    runs = _runs()
    accuracy = _accuracy(runs)
    seconds = {
        arm: fmean(float(row["train_time_s"]) for row in runs if row["arm"] == arm)
        for arm in ("all_large", *SUMMARY)
    }
    lines = [
        f"| four simulated workers ([rows]({up}results/gap/arms_runs.csv)) "
        "| points over four large batches | time | seeds | epochs |",
        "|---|---|---|---|---|",
    ]
    for arm, text in SUMMARY.items():
        (epochs,) = {row["epochs"] for row in runs if row["arm"] == arm}
        lines.append(
            f"| [{text}]({up}configs/gap/{arm}.yaml) "
            f"| {_less(accuracy[arm], accuracy['all_large'])} "
            f"| {seconds[arm] / seconds['all_large']:.2f} | {len(accuracy[arm])} | {epochs} |"
        )
    return lines


def fixed_rate(up: str) -> list[str]:
    """Return the same arms at their own learning rate and at the conference paper's."""
    tuned, published = _accuracy(_runs()), _accuracy(read(FIXED_RATE))
    lines = [
        f"| ([rows]({up}results/gap/fixed_rate/arms_runs.csv)) | at its own rate, % | at 0.1, % "
        "| difference, points, 95 % | over the baseline at its own rate | over it, all at 0.1 |",
        "|---|---|---|---|---|---|",
    ]
    baseline = "all_large"
    for arm in ARMS:
        if not (fixed := published.get(f"{arm}-lr0.1")):
            continue
        own = {seed: tuned[arm][seed] for seed in fixed}
        gains = ["baseline", "baseline"]
        if arm != baseline:
            others = (tuned[baseline], published[f"{baseline}-lr0.1"])
            gains = [_less(*pair) for pair in zip((own, fixed), others, strict=True)]
        cells = [*(with_interval(list(each.values()), 1) for each in (own, fixed))]
        cells += [_less(fixed, own), *gains]
        lines.append(f"| [{arm}]({up}configs/gap/{arm}.yaml) | {' | '.join(cells)} |")
    return lines


def _less(one: Mapping[int, float], other: Mapping[int, float]) -> str:
    """Return the mean difference of the seeds that both have, and its interval."""
    return with_interval([one[seed] - other[seed] for seed in one.keys() & other.keys()], 1, "+")


def _runs() -> Rows:
    return read(RESULTS / "gap/arms_runs.csv")


def _accuracy(runs: Rows) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for row in runs:
        found.setdefault(row["arm"], {})[int(row["seed"])] = float(row["accuracy"])
    return found
