import sys
from types import SimpleNamespace

import pytest
import wandb

from dbsl.log import workspace
from dbsl.log.charts import OVERLAID, STEPS, WORKERS

RUN = SimpleNamespace(entity="me", project="mine")


def made(monkeypatch, runs, url="https://there"):
    """Have so many runs in the project; return the views that are saved."""
    saved = []

    def view(entity, project):
        return SimpleNamespace(
            save=lambda: saved.append((entity, project)) or SimpleNamespace(url=url)
        )

    monkeypatch.setattr(workspace, "is_installed", lambda: True)
    monkeypatch.setattr(workspace, "view", view)
    monkeypatch.setattr(wandb, "Api", lambda timeout: SimpleNamespace(runs=lambda path: [0] * runs))
    workspace.make_first_view(RUN).join(10)
    return saved


def test_the_first_run_of_a_project_makes_the_view_and_later_ones_do_not(monkeypatch, capsys):
    assert made(monkeypatch, runs=1) == [("me", "mine")]
    assert capsys.readouterr().out == "wandb: view https://there\n"
    assert made(monkeypatch, runs=2) == []
    assert capsys.readouterr().out == ""


def test_a_view_that_cannot_be_made_is_one_line_that_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setattr(workspace, "is_installed", lambda: False)
    assert workspace.make_first_view(RUN) is None
    line = "python -m dbsl.log.workspace me/mine\n"
    install = "pip install wandb-workspaces && "
    assert capsys.readouterr().out == f"wandb: a view with all workers: {install}{line}"
    monkeypatch.setattr(workspace, "is_installed", lambda: True)
    monkeypatch.setattr(wandb, "Api", lambda timeout: 1 / 0)
    workspace.make_first_view(RUN).join(10)
    assert capsys.readouterr().out == f"wandb: a view with all workers: {line}"


@pytest.mark.parametrize("names", [[], ["me"], ["me/"], ["a/b", "c/d"]])
def test_the_command_refuses_what_is_no_project(names, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["workspace", *names])
    with pytest.raises(ValueError, match="the project must be given as ENTITY/PROJECT, got "):
        workspace.main()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_view_has_a_chart_of_all_workers_for_each_of_their_figures():
    pytest.importorskip("wandb_workspaces", reason="an optional package")
    sections = {section.name: section.panels for section in workspace.view("me", "mine").sections}
    for kind, name in ((WORKERS, "Workers, by epoch"), (STEPS, "Workers, on the way")):
        patterns = [panel.metric_regex for panel in sections[name]]
        assert patterns == [rf"^{kind}/{figure}/\d+$" for figure in OVERLAID[kind]]
    assert len(sections) == 5
    assert workspace.view("me", "mine")._to_model().spec  # what is sent
