"""Write the tables of README.md, docs/ and results/*/README.md from the CSV files of results/.

    python -m experiments.plots.tables          # write every table
    python -m experiments.plots.tables --check  # write nothing; name what differs, status 1

A table stands between two lines of a page, ``<!-- table: NAME -->`` and ``<!-- end -->``. NAME is
one of ``TABLES``.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from experiments.plots import (
    accuracy_tables,
    gap_tables,
    links,
    machine_tables,
    quotas,
    recipe_table,
    slow_links,
)
from experiments.plots.rows import ROOT

MARKED = re.compile(r"(<!-- table: (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)

TABLES: dict[str, Callable[[str], list[str]]] = {
    function.__name__: function
    for function in (
        accuracy_tables.first_command,
        accuracy_tables.mini,
        accuracy_tables.equal_time,
        accuracy_tables.beyond,
        accuracy_tables.vit,
        recipe_table.recipe,
        gap_tables.summary,
        gap_tables.gap,
        gap_tables.hypotheses,
        gap_tables.causes,
        gap_tables.fixed_rate,
        machine_tables.seconds,
        machine_tables.demo_uneven,
        quotas.quota_arms,
        quotas.quota_questions,
        quotas.quota_more,
        quotas.uneven_dual,
        links.links_questions,
        links.links_test_resnet,
        links.links_resnet10t,
        links.links_more_workers,
        slow_links.slow_arms,
        slow_links.slow_questions,
        slow_links.slow_more,
        machine_tables.demo_hybrid,
        machine_tables.link_check,
        machine_tables.islands,
        machine_tables.server_limits,
        machine_tables.studies,
        machine_tables.uneven,
        machine_tables.speed,
        machine_tables.gpu,
        machine_tables.own_loop,
    )
}


def pages() -> list[Path]:
    """Return the pages that may have tables."""
    own = sorted((ROOT / "experiments/results").glob("*/README.md"))
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *own]


def with_tables(text: str, up: str) -> str:
    """Return a page with each of its tables as the CSV files have it.

    Args:
        text: The page.
        up: Way from the page's folder to that of experiments, such as "../experiments/".

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
    parser = argparse.ArgumentParser(prog="python -m experiments.plots.tables", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--check", action="store_true", help="write nothing; fail if any differs")
    check = parser.parse_args(argv).check
    different = 0
    for page in pages():
        text = page.read_text(encoding="utf-8")
        try:
            new = with_tables(text, os.path.relpath(ROOT / "experiments", page.parent) + "/")
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
        sys.exit("error: run python -m experiments.plots.tables")


if __name__ == "__main__":
    main()
