"""With dbsl/tools and an extra's file deleted, the rest runs, and the extra's flags are refused."""

import inspect
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dbsl.config import hooks
from tests.helpers import ROOT, TINY, slow

EXTRAS = hooks.found_extras()
FILES = sorted(path.name for path in (ROOT / "dbsl/extras").iterdir() if path.stem in EXTRAS)
FIRST = {name: value for name, value in TINY.items() if name != "report_to"}
FIRST |= {"epochs": 1, "small_workers": 1, "large_batch_size": 3, "mixed_precision": "no"}
# Each tool prints its help, in one process.
HELP = """
import contextlib, runpy, sys

sys.argv[1:] = ["--help"]
for tool in ("plan", "predict", "profile", "report", "study"):
    with contextlib.suppress(SystemExit):
        runpy.run_module(f"dbsl.{tool}", run_name="__main__", alter_sys=True)
"""
CORE = ("tests/unit/plan/test_stages.py", "tests/unit/cluster/test_server.py")


def run(folder, *command):
    environment = {**os.environ, "PYTHONPATH": str(folder), "WANDB_MODE": "disabled"}
    how = {"cwd": folder, "env": environment, "capture_output": True, "text": True}
    return subprocess.run([sys.executable, *command], **how)


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
    helped = run(folder, "-c", HELP)
    assert (helped.returncode, helped.stdout.count("usage: ")) == (0, 5), helped.stderr
    shutil.rmtree(folder / "dbsl/tools")
    settings = EXTRAS["charts" if deleted == "all" else Path(deleted).stem].Settings
    for name in [*inspect.get_annotations(settings)][:1] if settings else ():
        flag = f"--{name.replace('_', '-')}"
        refused = run(folder, "train.py", flag, "1")
        (line,) = refused.stderr.strip().splitlines()
        assert (refused.returncode, f"got {flag}" in line) == (2, True), line
    settings = {n: [*v] if isinstance(v, tuple) else v for n, v in FIRST.items()}
    (folder / "first.yaml").write_text(yaml.safe_dump(settings))
    trained = run(folder, "train.py", "--config", "first.yaml", "--output-dir", "run")
    assert trained.returncode == 0, trained.stderr
    assert (folder / "run/model.safetensors").exists()
    if tested:
        options = ("-q", "-n", "0", "-p", "no:cacheprovider")
        passed = run(folder, "-m", "pytest", *options, *CORE)
        assert passed.returncode == 0, passed.stdout
