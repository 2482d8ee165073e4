"""With dbsl/tools and an extra's file deleted, the rest runs, and the extra's flags are refused."""

import inspect
import os
import runpy
import shutil
import subprocess
import sys
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
import yaml

from dbsl.config import hooks
from tests.helpers import ROOT, TINY, Forked, slow

EXTRAS = hooks.found_extras()
FILES = sorted(path.name for path in (ROOT / "dbsl/extras").iterdir() if path.stem in EXTRAS)
FIRST = {name: value for name, value in TINY.items() if name != "report_to"}
FIRST |= {"epochs": 1, "small_workers": 1, "large_batch_size": 3, "mixed_precision": "no"}
CORE = ("tests/unit/plan/test_stages.py", "tests/unit/cluster/test_server.py")


def forked(folder, *calls):
    """Run modules or train.py as commands, importing from a folder; return status and texts."""

    def run():
        os.chdir(folder)
        sys.path.insert(0, str(folder))
        for name in [name for name in sys.modules if name.partition(".")[0] in ("dbsl", "train")]:
            del sys.modules[name]
        for name, *sys.argv[1:] in calls:
            with suppress(SystemExit) if len(calls) > 1 else nullcontext():
                start = runpy.run_path if name.endswith(".py") else runpy.run_module
                start(name, run_name="__main__")

    child = Forked(run, WANDB_MODE="disabled")
    return child.wait(), child.stdout, child.stderr


@pytest.mark.parametrize(
    ("deleted", "tested"),
    [("all", False), *(pytest.param(file, True, marks=slow) for file in ("all", *FILES))],
)
def test_a_checkout_without_an_extra_trains_and_refuses_its_flags(deleted, tested, tmp_path):
    folder = tmp_path / "checkout"
    for name in ("dbsl", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("train.py", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    gone = folder / "dbsl/extras" / ("" if deleted == "all" else deleted)
    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    tools = ("plan", "predict", "profile", "report", "study")
    status, helped, error = forked(folder, *((f"dbsl.{tool}", "--help") for tool in tools))
    assert (status, helped.count("usage: ")) == (0, 5), error
    shutil.rmtree(folder / "dbsl/tools")
    settings = EXTRAS["charts" if deleted == "all" else Path(deleted).stem].Settings
    for name in [*inspect.get_annotations(settings)][:1] if settings else ():
        flag = f"--{name.replace('_', '-')}"
        status, _, error = forked(folder, ("train.py", flag, "1"))
        (line,) = error.strip().splitlines()
        assert (status, f"got {flag}" in line) == (2, True), line
    settings = {n: [*v] if isinstance(v, tuple) else v for n, v in FIRST.items()}
    (folder / "first.yaml").write_text(yaml.safe_dump(settings))
    call = ("train.py", "--config", "first.yaml", "--output-dir", "run")
    status, _, error = forked(folder, call)
    assert status == 0, error
    assert (folder / "run/model.safetensors").exists()
    if tested:
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *CORE]
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        subprocess.run(command, cwd=folder, env=environment, check=True)
