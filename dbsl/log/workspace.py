"""A saved view of a W&B project: accuracy over time, all workers in each chart, plan and reality.

    pip install wandb-workspaces
    python -m dbsl.log.workspace ENTITY/PROJECT

The first online run of a project makes it by itself where wandb-workspaces is installed.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from typing import Any

from dbsl.base.errors import SettingError, one_line_errors
from dbsl.log.charts import OVERLAID
from dbsl.log.rows import STEPS, WORKERS

NAME = "dbsl: workers"
_PACKAGE = "wandb_workspaces"


def main() -> None:
    """Make the view of the project that the command line names, and print its address."""
    names = sys.argv[1:]
    if len(names) != 1 or [bool(part) for part in names[0].split("/")] != [True, True]:
        raise SettingError(f"the project must be given as ENTITY/PROJECT, got {' '.join(names)!r}")
    if not is_installed():
        raise SettingError("wandb-workspaces must be installed (pip install wandb-workspaces)")
    print(view(*names[0].split("/")).save().url)


def is_installed() -> bool:
    """Whether views can be made here."""
    return importlib.util.find_spec(_PACKAGE) is not None


def how_to(project: str) -> str:
    """Return in one line how to get the view later."""
    install = "" if is_installed() else "pip install wandb-workspaces && "
    return f"wandb: a view with all workers: {install}python -m dbsl.log.workspace {project}"


def make_first_view(run: Any) -> threading.Thread | None:
    """Make the view in the background if this run is its project's first; else say how to.

    Args:
        run: W&B's run, online.
    """
    if not is_installed():
        print(how_to(f"{run.entity}/{run.project}"), flush=True)
        return None
    # Servers may take their time, or refuse: no run waits for that, or fails by it.
    thread = threading.Thread(target=_make, args=(run.entity, run.project), daemon=True)
    thread.start()
    return thread


def _make(entity: str, project: str) -> None:
    import wandb

    try:
        if len(wandb.Api(timeout=20).runs(f"{entity}/{project}")) <= 1:
            print(f"wandb: view {view(entity, project).save().url}", flush=True)
    except Exception:  # the network, the server, the package: many types
        print(how_to(f"{entity}/{project}"), flush=True)


def view(entity: str, project: str) -> Any:
    """Return the view, not saved yet."""
    import wandb_workspaces.reports.v2 as reports
    import wandb_workspaces.workspaces as workspaces

    def line(title: str, *y: str, x: str = "epoch", regex: str | None = None) -> Any:
        return reports.LinePlot(title=title, x=x, y=list(y), metric_regex=regex)

    def overlaid(kind: str) -> list[Any]:
        return [
            line(name.replace("_", " "), regex=rf"^{kind}/{name}/\d+$") for name in OVERLAID[kind]
        ]

    times = [
        line(
            f"{kind} workers: measured and planned [s per epoch]",
            *(f"time/{kind}_workers_s", f"time/predicted_{kind}_workers_s"),
        )
        for kind in ("small", "large")
    ]
    noise = [
        line("noise scale", "noise/b_simple", "noise/low", "noise/high"),
        line("batch sizes", regex=rf"^{WORKERS}/local_batch_size/\d+$"),
    ]
    result = [
        line("accuracy over training time", "eval/accuracy", x="time/train_s"),
        line("accuracy over simulated time", "eval/accuracy", x="time/virtual_s"),
        line("stages: resolution", "train/resolution", x="time/train_s"),
        line("stages: learning rate", "train/learning_rate", x="time/train_s"),
        line("loss", "train/loss", "eval/loss"),
    ]
    sections = {
        "Accuracy over time, with stages": result,
        "Workers, by epoch": overlaid(WORKERS),
        "Workers, on the way": overlaid(STEPS),
        "Planned and measured": times,
        "Noise scale and batch": noise,
    }
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name=NAME,
        sections=[
            workspaces.Section(name=name, panels=panels, is_open=True)
            for name, panels in sections.items()
        ],
        settings=workspaces.WorkspaceSettings(x_axis="epoch"),
    )


if __name__ == "__main__":
    with one_line_errors():
        main()
