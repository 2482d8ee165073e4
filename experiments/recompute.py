"""Recompute the figures of README.md and docs/results.md from the rows in experiments/results/.

    python -m experiments.recompute [FOLDER OF THE PAGES]

It shares no code with `plots.tables`, so that no mistake stands in both. ``TABLES`` says what the
rows must give for the cells of a table. A line of ``CLAIMS`` is a text of a page, in which {...}
says what they must give for the figures in its place. A text that has left the page fails, and so
does a figure of the results' prose that no line has. An expression is a verb, rows, and arms.
"""

import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pandas as pd
from scipy import optimize, stats

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "experiments/results"
WORDS = {"three": 3, "four": 4, "five": 5, "eight": 8}
FIGURE = rf"(?:[-+]?\d[\d,]*(?:\.\d+)?(?![\d.]*\d)|\b(?:{'|'.join(WORDS)})\b)"
FIGURES = rf"({FIGURE}(?:(?: ± |, | and | to | arms of ){FIGURE})*)"
MARKED = re.compile(r"<!-- table: (\S+) -->\n(.*?)<!-- end -->", re.DOTALL)
NO_PROSE = re.compile(r"<!-- table.*?<!-- end -->|```.*?```|`[^`]*`|\]\([^)]*\)", re.DOTALL)
SETTINGS = (  # which no row has: sizes, rates, bounds
    r"[04]\.[49] M|95 %|chance: 5 %|k = 1\.\d+|than 1\.05|ratio 1\.05|ratio 1\.10|tried, 0\.05|at 0\.1\)|rate, 0\.1,"
    r"|journal 0\.2\)|arms at 0\.1,|reach 78 %|rate, 0\.2 or 0\.4|0\.4 was the|have 0\.001|at 0\.004"
)
MEASURED = re.compile(SETTINGS + r"|([-+]?\d+\.\d+|\d[\d,]*(?= %)|(?<=± )\d+)")
SOURCES = """
equal=mini/equal_time
equal/ddp=mini/ddp/equal_time
fixed=gap/fixed_rate
gap5=gap:seed < 5
cifar=recipe:workload == 'cifar100'
nette=recipe:workload == 'imagenette'
resnet10t=demos/hybrid:model == 'resnet10t'
test_vit=demos/hybrid:model == 'test_vit'
lr0.05=demos/hybrid_tuning:model == 'resnet10t' and lr == 0.05
lr0.1=demos/hybrid_tuning:model == 'resnet10t' and lr == 0.1
"""  # short names of files, and of which of their rows
RECIPE = {"4": "all large, 4 merges", "8": "all large, 8 merges", "841": "merges 8, 4, 1"}
LABELS = {  # words of a row's label, and its arm; the first that fits
    "demo_uneven": "loop of=accelerate_ddp; equal parts=equal; --balance=balanced",
    "demo_slow_link": "0.4 M=test_resnet; 4.9 M=resnet10t",
    "demo_hybrid": "hybrid:=hybrid; cycling=cyclic; plain=ddp",
    "beyond": "reference=hybrid; plain data=ddp; delta=delta; --rounds-per-epoch=rounds_4;"
    " sqrt=lr_sqrt; linear=lr_linear; schedule cosine=cosine; every stage=stage_cosine; ema=ema"
    " (EMA); smoothing=label_smoothing; mixup=mixup; cutmix=cutmix; noise=noise_ratio",
    "recipe": "then three=ddp, then dual batch; data parallelism=ddp; merges and=both; ema=average"
    " of the last epochs; delta=slow momentum; no, three=small workers 0, 3, 4; three=dual batch, 4"
    " merges; eight, four and one=841; eight=8; all large=4",
}
SLOW = "\"demos/slow_link:model == '@' and megabits == ^\""
GAP = "ci gap @|over gap @ all_large|n gap @|train_accuracy gap @|epochs gap @|train_time_s gap @"
COMPARED = "sd ^ @|n ^ @|over ^ @ all_large|loss ^ @|epochs ^ @|train_time_s ^ @"
COMPARED += "|cost ^ @ all_large|minutes ^ @"
TABLES = {  # the cells of a row: @ is its arm, ^ the table or what stands before the arm
    "first_command": "sd digits first_command|minutes digits first_command",
    **dict.fromkeys(("summary", "gap"), GAP),
    **dict.fromkeys(("mini", "equal_time", "vit"), COMPARED),
    "hypotheses": "over gap ^ @|n gap ^ @|hypothesis ^ @",
    "fixed_rate": "ci gap5 @|ci fixed @-lr0.1|across fixed @-lr0.1 gap @"
    "|over gap5 @ all_large|over fixed @-lr0.1 all_large-lr0.1",
    "demo_uneven": "ci ^ @ epoch_s|turns ^ @ accelerate_ddp epoch_s|ci ^ @",
    "demo_slow_link": "|".join(
        f"ci {SLOW} {arm} train_s; ci {SLOW} {arm}"
        for arm in ("accelerate_ddp", "accelerate_local_sgd", "rounds_1", "rounds_4")
    ),
    "demo_hybrid": "ci ^ @ train_s|turns ^ @ ddp train_s|ci ^ @|over ^ @ ddp|low ^ @ ddp|n ^ @",
    "link_costs": "|".join(
        f"'{link}' \"link_costs:model == '^'\" '@'"
        for link in ("no cost", "10 Gb/s", "1 Gb/s", "0.1 Gb/s")
    ),
    "link_check": "|".join(
        f"link \"demos/link_check:sync == '^' and megabits == {rate}\"" for rate in (1000, 100, 10)
    ),
    "beyond": "over beyond '@' hybrid|over beyond_imagenette '@' hybrid",
    "beyond hybrid": "sd beyond hybrid|sd beyond_imagenette hybrid",
    "beyond ddp": "over beyond/ddp ddp_128 hybrid|over beyond_imagenette/ddp ddp_64 hybrid",
    "recipe": "|".join(
        f"lr {where} '@'; ci {where} '@'|over {where} '@' 4|virtual_s {where} '@'"
        for where in ("cifar", "nette")
    ),
}
CLAIMS = {
    "README.md": """
Real processes on two CPU cores, {n demos/uneven balanced} seeds
end with {train_accuracy gap ddp_128_1gbps; train_accuracy gap all_large} % of {images gap dual_3} training images
the baseline of five seeds has {accuracy gap5 all_large} %
the hybrid matched dual batch in {percent gap hybrid dual_3} % of the time
""",
    "docs/results.md": """
do: {images mini all_large} images of CIFAR-100
{epochs mini all_large} epochs, {n mini all_large} seeds
{arms mini; n mini all_large} runs took {all_minutes mini} minutes of one core
`small_alone` by {more equal small_alone all_large} %
(`p_holm` {holm mini/ddp ddp_128; holm mini/ddp ddp_256})
differences below {detectable mini} points
between {gain mini all_large dual_4_k105} and {gain mini all_large dual_1_k105} points
({over mini dual_1_k110 dual_1_k105} points with one)
one of four by {over mini dual_4_k105 dual_1_k105} points
and {over mini dual_4_k110 dual_1_k110} points (k = 1.10)
difference**: {over mini factor_none dual_2_k110} points
it, {over mini factor_sqrt dual_2_k110} with its root
ahead**: {over mini/ddp ddp_128 all_large} points
in {ratio mini/ddp ddp_128 all_large} times the baseline's time, and {over mini/ddp ddp_256 all_large}
in {ratio mini/ddp ddp_256 all_large} times.
ahead by {over equal/ddp ddp_128 all_large; over equal/ddp ddp_256 all_large}.
workers {over mini all_large_rounds_4 all_large} points
for {more mini all_large_rounds_4 all_large} % more time. With
all large by {over mini dual_3_rounds_4 all_large_rounds_4} points
time**: {saved mini cyclic all_large} %, at {over mini cyclic all_large} points
the two gave {over equal cyclic all_large; over equal progressive all_large} points
the hybrid {over equal hybrid all_large}.
large ({over mini hybrid_rounds_4 all_large_rounds_4}) in
) in {ratio mini hybrid_rounds_4 all_large_rounds_4} of its time
second**: {over mini conventional all_large} points
in {ratio mini conventional all_large} times the time
it is at {over equal conventional all_large}.
merge rule: {over mini asp dual_3_k105} points
tried, 0.05 ({accuracy lr0.05 hybrid} % there, {accuracy lr0.1 hybrid} % at 0.1)
saved {saved resnet10t cyclic ddp; saved test_vit cyclic ddp} % of the seconds
It lost {over resnet10t ddp cyclic; over test_vit ddp cyclic} points
scheme saved {saved resnet10t hybrid ddp} %, and its rounds cost {gain resnet10t ddp hybrid} points
scheme saved {saved test_vit hybrid ddp} %, and its rounds cost {gain test_vit ddp hybrid} points
{images gap all_large} images, {epochs gap all_large} epochs, rates
complete: {n gap dual_3} seeds of the four primary arms, {n gap hybrid} of
`dual_3` ends with {train_accuracy gap dual_3} % of
small workers ended {over gap dual_3 all_large} points
than four: {over gap dual_3 dual_4} points
parallelism ended {over gap ddp_128 dual_3} points
batch was {over gap ddp_128_1gbps dual_3} points below
took {ratio gap hybrid dual_3} of the time of dual batch and was {over gap hybrid dual_3} points
most**, with {train_accuracy fixed all_large-lr0.1} %
{over fixed dual_3-lr0.1 all_large-lr0.1} points there
seeds by {over gap5 dual_3 all_large} with
this change, {change} points
batch**: {accuracy gap alone_32; accuracy gap alone_128; accuracy gap alone_250} and
46.2 and {accuracy gap alone_512} %
rate, with {train_accuracy gap alone_32; train_accuracy gap alone_512} % of
that is {over gap alone_32 alone_512} points
250 samples was {over gap alone_250 all_large} points
those {over gap all_large_rounds_4 all_large} points
for {more gap all_large_rounds_4 all_large} % more time, as
({over gap all_large_rounds_4 dual_3} points between
did**: {over gap ddp_512 alone_512} points with 512 samples, {over gap ddp_128 alone_128} with
batches: {accuracy gap ddp_128; accuracy gap ddp_256; accuracy gap ddp_512} %
were {accuracy gap ddp_128_1gbps; accuracy gap ddp_256_1gbps; accuracy gap ddp_512_1gbps} %
({over gap dual_3 ddp_256_1gbps}), and was {over gap dual_3 ddp_512_1gbps} points
{accuracy gap dual_1; accuracy gap dual_2} %, with {train_accuracy gap dual_1; train_accuracy gap dual_2} %
rate** ended {over gap all_large all_large-lr1.6} points lower, with {train_accuracy gap all_large-lr1.6} %
that by {over gap dual_3 all_large-lr1.6} points
baseline {over gap all_large cyclic} points and saved {saved gap cyclic all_large} % of
{images beyond_imagenette hybrid} photographs
in {ratio beyond/ddp ddp_128 hybrid; ratio beyond_imagenette/ddp ddp_64 hybrid} times the hybrid's
ended at {sd beyond_imagenette/ddp hybrid} % (sd) on Imagenette then
(`p_holm` {holm beyond rounds_4}; {holm beyond_imagenette rounds_4} on Imagenette)
over {n cifar both} seeds; the first
{over cifar 8 ddp; over nette 8 ddp} points from it, in {ratio cifar 8 ddp; ratio nette 8 ddp} of
four gave {over cifar 8 4; over nette 8 4} points
idea) gave {over cifar 841 4; over nette 841 4} points with {fewer} % fewer
added {over cifar both 841; over nette both 841} points
were {over cifar both ddp} points from
in {ratio cifar both ddp} of its time, and {over nette both ddp} on
Imagenette, in {ratio nette both ddp} of it
{images vit hybrid} images, {epochs vit hybrid} epochs, a
{gain vit/ddp_tuning all_large-lr0.004 all_large-lr0.001} points behind
""",
}


@cache
def frame(where: str, arm: str = "") -> pd.DataFrame:
    """Return an arm's runs (empty: all) by seed or turn, accuracies in percent."""
    sources = dict(line.split("=", 1) for line in SOURCES.strip().splitlines())
    path, _, condition = sources.get(where, where).partition(":")
    names = (f"{path}_runs.csv", f"{path}/arms_runs.csv", f"{path}.csv")
    table = pd.read_csv(next(file for name in names if (file := RESULTS / name).is_file()))
    table = table.query(condition) if condition else table
    if arm:
        table = table[table["arm"] == RECIPE.get(arm, arm)]
    if table.empty:
        raise LookupError(f"no rows of {arm} in {where}")
    if "accuracy" in table and table["accuracy"].max() <= 1:
        table = table.assign(accuracy=100 * table["accuracy"])
    if "samples" in table:
        minutes = table["total_time_s"] / 60
        table = table.assign(minutes=minutes, images=table["samples"] / table["epochs"])
    if path == "recipe":  # the rate that was best with the first seed
        first = table[table["turn"] == 0]
        table = table[table["lr"] == first["lr"][first["accuracy"].idxmax()]]
    index = [name for name in ("seed", "turn") if name in table]
    return table.set_index(index[0]).sort_index() if index else table


def less(where: str, arm: str, other: str, whose: str = "") -> pd.Series:
    """Return by how many points an arm is ahead of another one (`whose` rows), seed by seed."""
    return (frame(where, arm)["accuracy"] - frame(whose or where, other)["accuracy"]).dropna()


def turns(where: str, arm: str, other: str, column: str = "") -> pd.Series:
    """Return the time of an arm over that of another one, seed by seed."""
    own, base = frame(where, arm), frame(where, other)
    column = column or next(c for c in ("train_time_s", "virtual_s", "train_s") if c in own)
    return (own[column] / base[column]).dropna()


def interval(values: pd.Series, share: float = 0.95) -> list[float]:
    """Return the mean and half its interval; of another share than 95 %, the lower end too."""
    half = stats.t.ppf((1 + share) / 2, len(values) - 1) * values.sem()
    return [values.mean(), half, *[values.mean() - half] * (share != 0.95)]


def cost(where: str, arm: str, other: str) -> list[float]:
    """Return the worker seconds for each point gained, where any is."""
    own, base = frame(where, arm), frame(where, other)
    more = (own["train_time_s"] * own["workers"]).mean()
    more -= (base["train_time_s"] * base["workers"]).mean()
    return [more / gain] if (gain := less(where, arm, other).mean()) > 0 else []


def holm(tests: Mapping[str, tuple[pd.Series, float]], name: str) -> float:
    """Return p of one of the tests that a mean is a value, corrected by Holm's rule for all."""
    p = sorted((stats.ttest_1samp(*tests[each]).pvalue, each) for each in tests)
    place = [each for _, each in p].index(name)
    return max(min(1.0, (len(p) - n) * p[n][0]) for n in range(place + 1))


def family(where: str, arm: str) -> float:
    """Return an arm's p against the baseline, corrected for all arms of its comparison."""
    base = "hybrid" if where.startswith("beyond") else "all_large"
    arms = set(frame(where)["arm"]) - {base}
    return holm({each: (less(where, each, base), 0.0) for each in arms}, arm)


def hypothesis(one: str, other: str) -> list[float]:
    """Return p, corrected but for the one at 1 Gb/s, and the margin where there is one."""
    tests = {arm: (less("gap", "dual_3", arm), 0.0) for arm in ("all_large", "dual_4", "ddp_128")}
    tests["dual_3"] = (less("gap", "hybrid", "dual_3"), -1.0)
    own = (less("gap", one, other), 0.0)
    return [holm(tests if other in tests else {other: own}, other), *[-1.0] * (one == "hybrid")]


def detectable(where: str) -> list[float]:
    """Return the least and the most points, by arm, that three seeds find in four of five cases."""
    shift = optimize.brentq(lambda x: stats.nct.sf(stats.t.ppf(0.975, 2), 2, x) - 0.8, 1, 20)
    arms = set(frame(where)["arm"]) - {"all_large"}
    return [shift * f(less(where, arm, "all_large").sem() for arm in arms) for f in (min, max)]


VERBS = {
    "ci": lambda where, arm, column="accuracy": interval(frame(where, arm)[column]),
    "sd": lambda where, arm: [*frame(where, arm)["accuracy"].agg(["mean", "std"])],
    "link": lambda where: frame(where).eval("predicted_epoch_s / real_epoch_s").item(),
    "n": lambda where, *arms: min(frame(where, arm).index.nunique() for arm in arms),
    "all_minutes": lambda where: frame(where)["minutes"].sum(),
    "arms": lambda where: frame(where)["arm"].nunique(),
    "over": lambda *names: interval(less(*names)) if names[1] != names[2] else [],
    "gain": lambda where, arm, other: less(where, arm, other).mean(),
    "across": lambda where, arm, whose, other: interval(less(where, arm, other, whose)),
    "low": lambda *names: interval(less(*names), 0.9)[2:] if names[1] != names[2] else [],
    "turns": lambda w, arm, other, c: interval(turns(w, arm, other, c)) if arm != other else 1,
    "ratio": lambda *names: turns(*names).mean(),
    "percent": lambda *names: 100 * turns(*names).mean(),
    "more": lambda *names: 100 * turns(*names).mean() - 100,
    "saved": lambda *names: 100 - 100 * turns(*names).mean(),
    "cost": cost,
    "holm": family,
    "hypothesis": hypothesis,
    "detectable": detectable,
    "change": lambda: interval(
        less("fixed", "dual_3-lr0.1", "all_large-lr0.1") - less("gap5", "dual_3", "all_large")
    ),
    "fewer": lambda: 100 - 100 * (11 * 8 + 6 * 4 + 3 * 1) / (20 * 8),  # epochs and merges of stages
}


@cache
def values(expressions: str) -> list[float]:
    """Return what the rows give for expressions with ; between them."""
    found = []
    for verb, *names in map(shlex.split, expressions.split("; ")):
        found.append(VERBS[verb](*names) if verb in VERBS else frame(*names)[verb].mean())
    return [*pd.Series(found, dtype=object).explode().dropna()]


def cells_of(table: str, label: str) -> list[str]:
    """Return the expressions of the cells of a row."""
    before, _, arm = label.partition(", ")
    if found := re.search(r"`(.+)` minus `(.+)`", label):
        before, arm = found.groups()
    elif found := re.match(r"\[(.+?)\]", label):
        before, arm = table.removesuffix("_time"), found[1]
        if table == "equal_time" or (table in ("mini", "vit") and arm.startswith("ddp")):
            before += "/ddp" * (arm in set(frame(f"{before}/ddp")["arm"]))
    elif table in LABELS:
        pairs = (pair.split("=") for pair in LABELS[table].split("; "))
        arm = next((arm for words, arm in pairs if words in label), "")
    rate = re.sub(r"\D", "", label.partition(" parameters")[2])  # Mb/s
    special = {"demo_uneven": "demos/uneven", "link_check": label, "demo_slow_link": rate}
    before = special.get(table, before)
    cells = TABLES.get(f"{table} {arm}") or TABLES[table]
    return cells.replace("@", arm).replace("^", before).split("|")


def figures(page: str, text: str) -> Iterator[tuple[int, str, str]]:
    """Yield place, text and expressions of each cell and claim; "" is told of what lacks either."""
    for table in MARKED.finditer(text):
        place = table.start(2)
        for number, line in enumerate(table[2].splitlines(keepends=True)):
            label, *cells = (cell.strip() for cell in line.strip()[1:-1].split("|"))
            if number > 1:
                yield from zip([place] * len(cells), cells, cells_of(table[1], label), strict=True)
            place += len(line)
    prose = list(NO_PROSE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text))
    for claim in CLAIMS[page].strip().splitlines():
        parts = re.split(r"\{(.*?)\}", claim)
        texts = (re.escape(part).replace(r"\ ", r"\s+") for part in parts[::2])
        found = [*re.finditer(FIGURES.replace(" ", r"\s+").join(texts), text)]
        for number, wanted in enumerate(parts[1::2], 1):
            if len(found) != 1:
                yield 0, claim, ""
                break
            start, end = found[0].span(number)
            prose[start:end] = " " * (end - start)
            yield start, found[0][number], wanted
    first = text.find("## Results") if page == "README.md" else 0
    last = text.find("\n## ", first + 1) if page == "README.md" else len(text)
    for found in MEASURED.finditer("".join(prose), first, last):
        if found[1]:
            yield found.start(), found[1], ""


def same(figure: str, value: float) -> bool:
    """Return whether a figure is a value rounded to its decimals."""
    number = str(WORDS.get(figure, figure)).replace(",", "")
    return abs(float(number) - value) < 0.5 / 10 ** len(number.partition(".")[2]) + 1e-9


def check(pages: Mapping[str, str]) -> tuple[Counter[str], list[str]]:
    """Return how many figures of each page were compared, and what is wrong on which line."""
    compared, wrong = Counter(), []
    for page, text in pages.items():
        for place, shown, wanted in figures(page, text):
            line = f"{page}:{text.count(chr(10), 0, place) + 1}: {shown!r}:"
            if not wanted:
                wrong.append(f"{line} page and CLAIMS must both have it, once")
                continue
            told, found = re.findall(FIGURE, shown), values(wanted)
            compared[page] += len(told)
            if shown == "below 0.001" and found[0] < 0.001:
                continue
            if len(told) != len(found) or not all(map(same, told, found)):
                wrong.append(f"{line} the rows give {', '.join(f'{v:.4f}' for v in found)}")
    return compared, wrong


def main(argv: list[str]) -> None:
    """Compare; status 1 if anything differs."""
    folder = Path(argv[0]) if argv else ROOT
    compared, wrong = check({name: (folder / name).read_text("utf-8") for name in CLAIMS})
    print(*wrong, *(f"{page}: {n} figures compared" for page, n in compared.items()), sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main(sys.argv[1:])
