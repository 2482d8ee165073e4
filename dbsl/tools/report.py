"""Draw a finished run again, send it to a tracker or a hub: ``python -m dbsl.report runs/x``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

from dbsl.base.errors import SettingError, in_line, require
from dbsl.base.machine import lazy_import
from dbsl.config.hooks import Extras
from dbsl.config.parse import POSITIONAL, parse_flags, yaml_to_argv
from dbsl.log.rows import read_metrics
from dbsl.model import load_model
from dbsl.settings import Settings

timm = lazy_import("timm")


@dataclass(frozen=True)
class _Arguments:
    """Draw a finished run again; send it to a tracker or a hub."""

    run: tuple[str, ...] = field(metadata=POSITIONAL)  # folder of a finished run
    report_to: str = "none"  # comma-separated trackers to send the run to
    push_to_hub: str | None = None  # repository user/name to push the timm model to


def main(argv: Sequence[str] | None = None) -> None:
    """Report a run's rows again, as the run did; push its model."""
    given = parse_flags(_Arguments, argv, prog="python -m dbsl.report")
    require(len(given.run) == 1, "run must be one folder", given.run)
    folder = Path(*given.run)
    require((folder / "summary.json").is_file(), "run must be a finished run's folder", str(folder))
    rows = read_metrics(folder / "metrics.jsonl")
    plans = list(takewhile(lambda row: row["event"] == "plan", rows))
    settings = parse_flags(Settings, yaml_to_argv({"report_to": given.report_to}))
    with Extras.of(settings).report(folder, plans) as tell:
        for row in rows[len(plans) :]:
            tell(row)
    if given.push_to_hub:
        print(f"pushed: {_push(folder, given.push_to_hub)}")


def _push(folder: Path, repository: str) -> str:
    """Push a run's timm model to a hub repository, user/name; return the commit's URL."""
    push, model = timm.models.push_to_hf_hub, load_model(folder)
    try:
        return push(model, repository, safe_serialization=True).commit_url
    except Exception as reason:  # network, login or name: many types
        must = "push_to_hub must be a repository that can be written"
        raise SettingError(f"{must}, got {repository} ({in_line(reason)})") from reason
