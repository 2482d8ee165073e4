"""Recompute the figures of README.md, docs/ and results/*/README.md from their rows.

    python -m experiments.recompute [FOLDER OF THE PAGES]

recompute.yaml says what the rows must give for the cells of tables and for texts, and which pages
are read. A text that has left its page fails, and so does a decimal number, percentage or interval
in prose that no text covers. Whole numbers, such as batch sizes, are held against rows only where a
text has them.
"""

import json
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from scipy import optimize, stats

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "experiments/results"
SHORT, TABLES, CLAIMS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text()).values()
WHOLE = ("README.md", "docs/results.md")  # every decimal of their prose needs a claim
MORE = ("four", "eight", "four_larger")  # cases of links/more_workers.csv
WORDS = {"three": 3, "four": 4, "five": 5, "eight": 8}
FIGURE = rf"(?:[-+]?\d[\d,]*(?:\.\d+)?(?![\d.]*\d)|\b(?:{'|'.join(WORDS)})\b)"
FIGURES = rf"({FIGURE}(?:(?: ± |, | and | to ){FIGURE})*)".replace(" ", r"\s+")
MEASURED = re.compile(r"[-+]?\d+\.\d+|\d[\d,]*(?=\s%)|(?<=± )\d+")  # what prose must account for
MARKED = re.compile(r"<!-- table: (\S+) -->\n(.*?)<!-- end -->", re.DOTALL)
NO_PROSE = re.compile(r"<!-- table.*?<!-- end -->|```.*?```|`[^`]*`|\]\([^)]*\)", re.DOTALL)


@cache
def gpu_lines() -> list[dict[str, Any]]:
    """Return the lines of results/gpu that were finished, by date."""
    texts = [path.read_text() for path in (RESULTS / "gpu").glob("*.jsonl")]
    lines = [json.loads(line) for line in "".join(texts).splitlines()]
    return sorted((one for one in lines if one["status"] == "ok"), key=lambda one: one["date"])


def stages() -> pd.DataFrame:
    """Return the stages of results/gpu that trained; `arm` is the stage, accuracies the last.

    Where a tuning gave a rate, it ends the stage's name.
    """
    lines = []
    for one in gpu_lines():
        if "accuracy" in one["figures"]:
            flags, name = one["figures"].get("flags", ()), one["stage"]
            rate = f"-lr{flags[flags.index('--lr') + 1]}" if "--lr" in flags else ""
            lines.append({"arm": name + rate, **one["figures"]})
    found = pd.DataFrame(lines)
    return found.assign(accuracy=found["accuracy"].str[-1])


def stage(name: str, *figures: str) -> list[float]:
    """Return figures of the last run of a stage on a GPU, those with % in percent."""
    last = next(one["figures"] for one in reversed(gpu_lines()) if one["stage"] == name)
    return [100 * last[f[1:]] if f.startswith("%") else last[f] for f in figures]


def speed(what: str, resolution: str, precision: str) -> list[float]:
    """Return an arm's images a second in results/speed.csv, and train.py's over another arm's."""
    own = rows(f"speed:part == 'training' and resolution == {resolution}")
    own = own[(own["what"] == what) & (own["precision"] == precision)].iloc[0]
    return [own["median"], *([own["train.py_over_it"]] if what != "train.py, 1 worker" else [])]


def peak(what: str) -> list[float]:
    """Return an arm's least and most memory; the plain loop's is from its set-up, and not told."""
    own = rows("speed:part == 'training'")
    return [] if "plain" in what else own.loc[own["what"] == what, "peak_mib"].agg(["min", "max"])


def beside(what: str) -> list[float]:
    """Return the least and the most of train.py's images a second over another program's."""
    own = rows("speed:part == 'training'")
    return [*own.loc[own["what"] == what, "train.py_over_it"].agg(["min", "max"])]


def done(prefix: str, planned: str) -> list[float]:
    """Return how many stages of a kind were finished on a GPU, and how many were planned."""
    names = {one["stage"] for one in gpu_lines()}
    return [sum(f"{name}-".startswith(f"{prefix}-") for name in names), float(planned)]


@cache
def rows(where: str, arm: str = "") -> pd.DataFrame:
    """Return an arm's runs (empty: all) by seed or turn, accuracies in percent."""
    path, _, condition = where.partition(":")
    tables = []
    for part in path.split("+"):
        if part == "gpu":
            tables.append(stages())
            continue
        names = (f"{part}_runs.csv", f"{part}/arms_runs.csv", f"{part}.csv")
        file = next((RESULTS / name for name in names if (RESULTS / name).is_file()), None)
        if file is None:
            raise LookupError(f"no file of rows for {part}")
        tables.append(pd.read_csv(file))
    table = pd.concat(tables)
    table = table.query(condition) if condition else table
    table = table[table["arm"] == arm] if arm else table
    if table.empty:
        raise LookupError(f"no rows of {arm} in {where}")
    if "accuracy" in table and table["accuracy"].max() <= 1:
        table = table.assign(accuracy=100 * table["accuracy"])
    if path == "recipe":  # the rate that was best with the first seed
        first = table[table["turn"] == 0]
        table = table[table["lr"] == first["lr"][first["accuracy"].idxmax()]]
    index = [name for name in ("seed", "turn") if name in table]
    return table.set_index(index[0]).sort_index() if index else table


def ahead(where: str, arm: str, other: str, whose: str = "") -> pd.Series:
    """Return by how many points an arm is ahead of another one (`whose` rows), seed by seed."""
    return (rows(where, arm)["accuracy"] - rows(whose or where, other)["accuracy"]).dropna()


def times(where: str, arm: str, other: str, column: str = "") -> pd.Series:
    """Return the time of an arm over that of another one, seed by seed."""
    own, base = rows(where, arm), rows(where, other)
    column = column or next(c for c in ("train_time_s", "virtual_s", "train_s") if c in own)
    return (own[column] / base[column]).dropna()


def interval(values: pd.Series, share: float = 0.95) -> list[float]:
    """Return the mean and half of its interval; of one value the value."""
    if len(values) == 1:
        return [values.iloc[0]]
    return [values.mean(), stats.t.ppf((1 + share) / 2, len(values) - 1) * values.sem()]


def cost(where: str, arm: str, other: str) -> list[float]:
    """Return the worker seconds for each point gained, where any is."""
    own, base = rows(where, arm), rows(where, other)
    more = (own["train_time_s"] * own["workers"]).mean()
    more -= (base["train_time_s"] * base["workers"]).mean()
    return [more / gain] if (gain := ahead(where, arm, other).mean()) > 0 else []


def holm(tests: Mapping[str, pd.Series], name: str) -> float:
    """Return p of one of the tests that a mean is 0, corrected by Holm's rule for all of them."""
    p = {each: stats.ttest_1samp(v, 0).pvalue if len(v) else 1.0 for each, v in tests.items()}
    return holm_p(p, name)


def holm_p(p: Mapping[str, float], name: str) -> float:
    """Return one of several p, corrected by Holm's rule for all of them."""
    every = np.nan_to_num([*p.values()], nan=1.0)  # where all values are 0
    return min(1.0, max((every >= each).sum() * each for each in every if each <= p[name]))


def corrected(where: str, arm: str) -> float:
    """Return an arm's p against the baseline, corrected for all arms of its comparison."""
    base = "hybrid" if where.startswith("beyond") else "all_large"
    arms = set(rows(where)["arm"]) - {base}
    return holm({each: ahead(where, each, base) for each in arms}, arm)


def hypothesis(where: str, one: str, other: str) -> list[float]:
    """Return p, corrected but for the one at 1 Gb/s, and the margin where there is one."""
    tests = {each: ahead(where, "dual_3", each) for each in ("all_large", "dual_4", "ddp_128")}
    tests["dual_3"] = ahead(where, "hybrid", "dual_3") + 1.0
    alone = {other: ahead(where, one, other)}
    return [holm(tests if other in tests else alone, other), *[-1.0] * (one == "hybrid")]


def cause(where: str, one: str, other: str) -> float:
    """Return p of a hypothesis of configs/causes, corrected for its family, whether run or not."""
    large, alone, dual = "all_large", "alone_512", ("dual_3_rounds", "dual_4_rounds")
    batch = [(f"{large}_156", large), (f"{large}_rounds_4", f"{large}_156")]
    batch += [(f"{large}_rounds_8", f"{large}_rounds_4")]
    batch += [tuple(f"{each}_{merges}" for each in dual) for merges in (4, 8)]
    norm = [(f"{alone}_ghost", alone), (f"{alone}_long", alone)]
    norm += [("dual_3_anew (EMA)", other) for other in ("dual_3_anew", f"{large}_anew (EMA)")]
    server = [(f"dual_3_asp_{merge}", f"{large}_asp_{merge}") for merge in ("ratio", "half")]
    pairs = next(family for family in (batch, norm, server) if (one, other) in family)
    ran = set(rows(where)["arm"])
    tests = {
        f"{a} minus {b}": ahead(where, a, b) if {a, b} <= ran else pd.Series() for a, b in pairs
    }
    return holm(tests, f"{one} minus {other}")


def detectable(where: str) -> list[float]:
    """Return the least and the most points, by arm, that three seeds find in four of five cases."""
    shift = optimize.brentq(lambda x: stats.nct.sf(stats.t.ppf(0.975, 2), 2, x) - 0.8, 1, 20)
    arms = set(rows(where)["arm"]) - {"all_large"}
    return [shift * f(ahead(where, arm, "all_large").sem() for arm in arms) for f in (min, max)]


def change() -> list[float]:
    """Return what the fixed rate changes in the lead of dual batch."""
    fixed = ahead("gap/fixed_rate", "dual_3-lr0.1", "all_large-lr0.1")
    return interval((fixed - ahead("gap", "dual_3", "all_large")).dropna())


def one_sided(values: pd.Series, bound: float) -> float:
    """Return p of the one-sided test that a mean is above a bound."""
    return stats.t.sf((values.mean() - bound) / values.sem(), len(values) - 1)


def within(values: pd.Series, margin: float) -> float:
    """Return p of the two one-sided tests that a mean is within a margin of 0."""
    return max(one_sided(values, -margin), one_sided(-values, -margin))


def format_less(wire: str) -> pd.Series:
    """Return a format's accuracy less that of float32, mean of both models and 4, 8, 16 rounds."""
    cells = [(short, f"rounds_{n}") for short in ("small_acc", "large_acc") for n in (4, 8, 16)]
    less = [ahead(SHORT[short], f"{way} {wire}", f"{way} float32") for short, way in cells]
    return pd.concat(less, axis=1, join="inner").mean(axis=1)


def format_p(wire: str) -> float:
    """Return its p of equivalence within half a point."""
    return holm_p({each: within(format_less(each), 0.5) for each in ("int8", "int4", "int2")}, wire)


def goal_p(where: str, arm: str, folder: str = "links") -> float:
    """Return p of its accuracy not being a point lower than PowerSGD's, in rows of a folder."""
    models = (SHORT["small_acc"], SHORT["large_acc"])
    cases = [(each, f"rounds_8 {wire}") for wire in ("int2", "int4") for each in models]
    whose = {each: each.replace("links", folder, 1) for each in models}
    less = {(w, a): ahead(w, a, "step powersgd:4:4", whose[w])[:5] for w, a in cases}
    return holm_p({case: one_sided(v, -1.0) for case, v in less.items()}, (where, arm))


def more_workers_p(case: str, arm: str) -> float:
    """Return p of an arm of simulated workers not being a point lower than PowerSGD."""
    where = "links/more_workers:megabits == 10 and model == '{}'".format
    cases = [(each, f"rounds_8 {wire}") for each in MORE for wire in ("int2", "int4")]
    less = {(c, a): ahead(where(c), a, "step powersgd:4:4") for c, a in cases}
    return holm_p({key: one_sided(each, -1.0) for key, each in less.items()}, (case, arm))


def ended() -> pd.DataFrame:
    """Return the whole trainings on shaped links, of both machines."""
    tables = [rows(f"links/{part}time").assign(machine=part) for part in ("", "second/")]
    return pd.concat(tables).dropna(subset="accuracy").rename_axis("seed").reset_index()


def repeats() -> list[float]:
    """Return how many of them ended as without a shaped link, and of how many."""
    key = ["model", "arm", "seed"]
    free = rows("links/accuracy").reset_index()
    both = ended().merge(free, on=key, suffixes=("", "_free"))
    return [(both["accuracy"] == both["accuracy_free"]).sum(), len(ended())]


def alike() -> list[float]:
    """Return how many arms and turns ended at one accuracy at all rates, and of how many."""
    each = ended().groupby(["machine", "model", "arm", "seed"])["accuracy"]
    several = each.nunique()[each.size() > 1]
    return [(several == 1).sum(), len(several)]


UNLIKE = ("2:1", "4:1", "2:1, then 1:2", "2:2:1", "2:1:1")


def quota_less(arm: str) -> pd.Series:
    """Return a rule's accuracy less that of plain DDP, mean of the uneven machines."""
    where = (f"uneven/quota:machine == '{name}'" for name in UNLIKE)
    less = [ahead(each, arm, "accelerate_ddp") for each in where]
    return pd.concat(less, axis=1, join="inner").mean(axis=1)


def gain_p(name: str) -> list[float]:
    """Return p of the balanced parts' time on an uneven machine."""
    tests = {
        each: times(f"uneven/quota:machine == '{each}'", "dynamic", "accelerate_ddp", "train_s") - 1
        for each in UNLIKE
    }
    return [holm(tests, name)] if name in tests else []


def speed_limit(where: str) -> float:
    """Return the time of the best parts over that of equal ones."""
    speeds = [*map(int, where.split("'")[1].partition(",")[0].split(":"))]
    return len(speeds) * min(speeds) / sum(speeds)


def reached(where: str, arm: str) -> list[float]:
    """Return an arm's tokens a second over those of the fast process alone times all speeds."""
    speeds = [*map(int, where.split("'")[1].split(":"))]
    return interval(times(where, arm, "alone", "tokens_per_s") * max(speeds) / sum(speeds))


def pair_p(machine: str, arm: str) -> float:
    """Return p of an arm's time over that of the fast one alone, corrected for all twelve."""
    tests = {
        (each, other): times(f"pair/pair:machine == '{each}'", other, "alone") - 1
        for each in ("1:1", "1.5:1", "2.5:1", "4:1")
        for other in ("train.py", "uneven", "rounds")
    }
    return holm(tests, (machine, arm))


def slow_p(megabits: str, question: str) -> float:
    """Return p of a question on a slow link, corrected for three questions on three links.

    The best arms are those of the tuning; a test whose runs are not all there counts as 1.
    """
    tests = {(rate, each): slow_less(rate, each) for rate in (10, 100, 1000) for each in "123"}
    return holm(tests, (int(megabits.replace(",", "")), question))


def tuned(gbps: float) -> pd.Series:
    """Return the best mean of both tuning seeds, percent, by arm of a slow link."""
    each = rows(f"slow/tuning:gbps == {gbps}").groupby(["arm", "point"])["accuracy"]
    return each.mean()[each.size() == 2].groupby("arm").max()


def slow_less(megabits: int, question: str) -> pd.Series:
    """Return the points of a question on a slow link, seed by seed; none if arms are not whole."""
    joint, small = ["ddp", "ddp_fp16", "powersgd", "larger_batch"], ["dual_3_rounds"]
    small.append("dual_4_rounds")
    rounds = ["local_sgd", "diloco", "post_local", "qsr", *small, "dual_4_int"]
    own = rows("slow").query(f"gbps == {megabits / 1000}").groupby("arm").size()
    if [own.get(arm, 0) for arm in joint + rounds] != [5] * 11:
        return pd.Series()
    best = tuned(megabits / 1000)
    one, other = {
        "1": (best[rounds].idxmax(), best[joint].idxmax()),
        "2": (best[small].idxmax(), "local_sgd"),
        "3": ("dual_4_int", "dual_4_rounds"),
    }[question]
    return ahead(f"slow:gbps == {megabits / 1000}", one, other)


def repeated() -> float:
    """Return the root mean square of what tuning runs made for two slow links differ by."""
    own = rows("slow/tuning").reset_index().query("device == 'NVIDIA H200' and epochs == 133")
    pairs = own.groupby(["arm", "point", "turn"])["accuracy"].agg(["size", "max", "min"])
    pairs = pairs[pairs["size"] == 2]
    return float(np.sqrt(((pairs["max"] - pairs["min"]) ** 2).mean()))


VERBS = {verb.__name__: verb for verb in (cost, corrected, hypothesis, cause, detectable, change)}
VERBS |= {"stage": stage, "done": done, "speed": speed, "peak": peak, "beside": beside}
VERBS |= {verb.__name__: verb for verb in (format_p, goal_p, gain_p, speed_limit, reached)}
VERBS |= {verb.__name__: verb for verb in (more_workers_p, repeats, alike, slow_p, repeated)}
VERBS |= {"pair_p": pair_p}
VERBS |= {
    "const": lambda *numbers: [*map(float, numbers)],  # what no row says, such as a margin
    "told": lambda where, column, n: float(  # of a cell with several numbers
        re.findall(r"[-+]?\d+\.\d+", rows(where)[column].iloc[0])[int(n)]
    ),
    "ms": lambda where, column: interval(1e3 * rows(where)[column]),
    "predicted": lambda where, column, arm: interval(
        rows(where, "train.py")[column] / rows(where, arm)["epoch_s"]
    ),
    "formats": lambda wire: interval(format_less(wire)),
    "formats_n": lambda wire: len(format_less(wire)),
    "quotas": lambda arm: interval(quota_less(arm)),
    "quotas_n": lambda arm: len(quota_less(arm)),
    "quotas_p": lambda arm: holm_p(
        {a: within(quota_less(a), 1.0) for a in ("dynamic", "dbs")}, arm
    ),
    "held_out": lambda where, arm: tuned(float(where.rpartition(" ")[2]))[arm],
    "paired_p": lambda *names: float(stats.ttest_1samp(ahead(*names), 0).pvalue),
    "over5": lambda *names: interval(ahead(*names)[:5]),
    "n5": lambda *names: len(ahead(*names)[:5]),
    "ci": lambda where, arm, column="accuracy": interval(rows(where, arm).eval(column)),
    "sd": lambda where, arm: rows(where, arm)["accuracy"].agg(["mean", "std"]),
    "n": lambda where, *arms: min(rows(where, arm).index.nunique() for arm in arms),
    "arms": lambda where: rows(where)["arm"].nunique(),
    "all_minutes": lambda where: rows(where)["total_time_s"].sum() / 60,
    "over": lambda *names: interval(ahead(*names)),
    "low": lambda *names: np.subtract(*interval(ahead(*names), 0.9)),
    "gain": lambda *names: ahead(*names).mean(),
    "ratios": lambda *names: interval(times(*names)),
    "ratio": lambda *names: times(*names).mean(),
    "percent": lambda *names: 100 * times(*names).mean(),
    "more": lambda *names: 100 * times(*names).mean() - 100,
    "saved": lambda *names: 100 - 100 * times(*names).mean(),
}


@cache
def values(expressions: str) -> list[float]:
    """Return what the rows give for expressions with ; between them."""
    found: list[float] = []
    for expression in expressions.split(";"):
        verb, *names = (SHORT.get(word, word) for word in shlex.split(expression))
        if len(names) > 2 and names[1] == names[2]:  # the row of the baseline itself
            found += [1.0] * (verb == "ratios")
            continue
        value = VERBS[verb](*names) if verb in VERBS else rows(*names).eval(verb).mean()
        found += np.atleast_1d(value).tolist()
    return found


def cells_of(table: str, label: str) -> list[str]:
    """Return the expressions of the cells of a row; none where nothing fits its label."""
    rule = TABLES.get(table, {"rows": {}})
    for pattern, text in rule["rows"].items():
        if found := re.search(pattern, label):
            text = found.expand(text)
            return (text if "|" in text else rule["cells"].replace("@", text)).split("|")
    return []


def figures(page: str, text: str) -> Iterator[tuple[int, str, str]]:
    """Yield place, text and expressions of each cell and claim; "" where one lacks the other."""
    for table in MARKED.finditer(text):
        for row in [*re.finditer(r"^\|(.*)\|$", table[2], re.MULTILINE)][2:]:
            label, *cells = map(str.strip, row[1].split("|"))
            for cell, wanted in zip_longest(cells, cells_of(table[1], label), fillvalue=""):
                yield table.start(2) + row.start(), cell, wanted
    prose = NO_PROSE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    for claim in CLAIMS[page].splitlines():
        parts = re.split(r"\{(.*?)\}", claim)
        pattern = FIGURES.join(map(re.escape, parts[::2]))
        pattern = pattern.replace(r"\ \.\.\.\ ", r"\D+?").replace(r"\ ", r"\s+")
        found = [*re.finditer(pattern, text)]
        if len(found) != 1:
            yield 0, claim, ""
            continue
        start, end = found[0].span()
        prose = prose[:start] + " " * (end - start) + prose[end:]
        for number, wanted in enumerate(parts[1::2], 1):
            yield found[0].start(number), found[0][number], wanted
    if not CLAIMS[page]:
        return  # of this page only the tables are held against rows
    for rest in MEASURED.finditer(prose) if page in WHOLE else ():
        yield rest.start(), rest[0], ""


def same(figure: str, value: float) -> bool:
    """Return whether a figure is a value rounded to its decimals."""
    number = str(WORDS.get(figure, figure)).replace(",", "")
    return abs(float(number) - value) < 0.5 / 10 ** len(number.partition(".")[2]) + 1e-9


def main(argv: list[str]) -> None:
    """Compare; status 1 if anything differs."""
    folder, wrong = Path(argv[0]) if argv else ROOT, 0
    for page in CLAIMS:
        text, compared = (folder / page).read_text("utf-8"), 0
        for place, shown, wanted in figures(page, text):
            told = re.findall(FIGURE, re.sub("`[^`]*`", "", shown))  # names have digits, too
            try:
                given = values(wanted) if wanted else []
            except LookupError:  # no rows yet, and so no figure
                if told:
                    raise
                given = []
            compared += len(told) if wanted else 0
            if wanted and len(told) == len(given) and all(map(same, told, given)):
                continue
            if shown == "below 0.001" and given[0] < 0.001:
                continue
            wrong += 1
            why = "no claim covers it" if place else "the page must have it, once"
            if wanted:
                why = "the rows give " + ", ".join(f"{value:.4f}" for value in given)
            print(f"{page}:{text.count(chr(10), 0, place) + 1}: {shown!r}: {why}")
        print(f"{page}: {compared} figures compared")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main(sys.argv[1:])
