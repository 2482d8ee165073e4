"""The notebook of the first command, its code run as a notebook would."""

import json
import os
import runpy
import subprocess
import sys
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

from tests import helpers
from tests.helpers import ROOT

NOTEBOOK = ROOT / "examples/first_run.ipynb"


def code_cells():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_the_notebook_runs_the_first_command_and_was_saved_without_outputs():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    command = "accelerate launch train.py --small-ratio 0.1"
    assert command in (ROOT / "README.md").read_text()
    assert [source for source in code_cells() if command in source]
    assert not [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")]


@pytest.mark.parametrize("small", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.timeout(1800)
def test_the_notebooks_cells_run_and_the_model_learns(tmp_path, monkeypatch, capfd, small):
    for name in ("train.py", "dbsl", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plt, "show", lambda: plt.close("all"))
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    names: dict[str, object] = {}
    for source in code_cells():
        if small and source.startswith("!accelerate"):
            helpers.run("runs/first", dataset="digits", small_ratio=0.1, epochs=1, lr_milestones=())
        elif small and source.startswith("!torchrun"):
            script = ROOT / f"{source.split()[-1].replace('.', '/')}.py"
            call = partial(runpy.run_path, str(script), run_name="__main__")
            print(helpers.end_ranks(helpers.start_ranks(call, 2)))
        elif source.startswith("!"):
            if not source.startswith("!pip"):  # installed: these tests run
                subprocess.run(source[1:], shell=True, check=True, env=environment)
        else:
            exec(source, names)
    assert names["split"].local_batch_sizes == (192, 64)
    assert small or names["summary"]["final_accuracy"] > 0.95
    printed = capfd.readouterr().out
    assert "accuracy at the last epoch" in printed
    assert "process 0: 183 samples a step" in printed
