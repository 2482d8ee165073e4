"""Draw a finished run again, send it to a tracker or a hub: ``python -m dbsl.report runs/x``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields, make_dataclass
from itertools import takewhile
from pathlib import Path

from dbsl.base.errors import SettingError, in_line
from dbsl.base.machine import lazy_import
from dbsl.config.fields import refuse
from dbsl.config.hooks import Extras, settings_of_extras
from dbsl.config.parse import read_settings
from dbsl.config.settings import RunConfig
from dbsl.log.rows import read_metrics
from dbsl.model import load_model
from dbsl.tools.predict import Parser

timm = lazy_import("timm")


def report(folder: Path, report_to: str | None = None) -> None:
    """Hand a run's rows to what only reports, as the run did; `report_to` names trackers."""
    if not (folder / "summary.json").is_file():
        raise SettingError(f"run must be the folder of a finished run, got {folder}")
    settings = make_dataclass("_", [], bases=(*settings_of_extras(), RunConfig), frozen=True)
    given = {"report_to": report_to or "none"}
    if "report_to" not in {field.name for field in fields(settings)}:
        if report_to is not None:
            raise SettingError(f"report_to needs dbsl/extras/charts, got {report_to}")
        given = {}
    own, whole = read_settings(folder / "config.yaml"), False  # before a picture is drawn
    there = (folder / "metrics.jsonl").is_file()
    rows = read_metrics(folder / "metrics.jsonl") if there else []
    with suppress(OSError, ValueError, TypeError):
        names = ("summary.json", "plan.json")
        summary, plans = (json.loads((folder / n).read_text(encoding="utf-8")) for n in names)
        trained = any(row.get("event") == "round" for row in rows)
        found = {*summary, *own} >= {"classes", "final_accuracy", "epochs", "rounds_per_epoch"}
        whole = found and bool(plans) and isinstance(plans, dict) and trained
    files = "config.yaml, plan.json, summary.json and metrics.jsonl"
    refuse([(not whole, f"run must have a whole {files}", str(folder))])
    plots = folder / "plots"
    refuse([(plots.exists() and not plots.is_dir(), "plots must be a folder", f"file {plots}")])
    first = list(takewhile(lambda row: row["event"] == "plan", rows))
    with Extras.of(settings(**given)).report(folder, first) as tell:
        for row in rows[len(first) :]:
            tell(row)


def push(folder: Path, repository: str) -> str:
    """Push a run's timm model to a hub repository, user/name; return where it is."""
    model = load_model(folder)
    try:
        done = timm.models.push_to_hf_hub(model, repository, safe_serialization=True)
    except Exception as reason:  # network, login or name: many types
        must = "push_to_hub must be a repository that can be written"
        raise SettingError(f"{must}, got {repository} ({in_line(reason)})") from reason
    return done.commit_url


def main(argv: Sequence[str] | None = None) -> None:
    """Report on a run."""
    parser = Parser("python -m dbsl.report", description=__doc__.split(":")[0])
    parser.add_argument("run", type=Path, help="folder of a finished run")
    parser.add_argument("--report-to", help="comma-separated trackers to send the run to")
    parser.add_argument("--push-to-hub", help="repository user/name to push the timm model to")
    arguments = parser.parse_args(argv)
    report(arguments.run, arguments.report_to)
    if arguments.push_to_hub:
        print(f"pushed: {push(arguments.run, arguments.push_to_hub)}")
