"""With dbsl/tools and an extra's file deleted, the rest runs, and the extra's flags are refused."""

import os
import shutil
import subprocess
import sys

import pytest

from dbsl.config import hooks
from tests.helpers import ROOT, slow

FILES = sorted({*hooks._SETTINGS, "pictures.py"})
FIRST = (
    "--model test_resnet --train-samples 60 --eval-samples 20 --resolutions 16 --epochs 1 "
    "--slope 0.001 --intercept 0.01 --lr 0.02 --small-workers 1 --large-batch-size 3 "
    "--cpu-threads 1 --mixed-precision no --output-dir run"
)
CORE = ("tests/unit/plan/test_stages.py", "tests/unit/cluster/test_server.py")


def run(folder, *command):
    environment = {**os.environ, "PYTHONPATH": str(folder), "WANDB_MODE": "disabled"}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True
    )


@pytest.mark.parametrize(
    "deleted",
    ["all", *(pytest.param(file, marks=slow) for file in FILES)],
)
def test_a_checkout_without_an_extra_trains_and_names_the_file_that_a_flag_needs(deleted, tmp_path):
    folder = tmp_path / "checkout"
    for name in ("dbsl", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("train.py", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    shutil.rmtree(folder / "dbsl/tools")
    gone = folder / "dbsl/extras" / ("" if deleted == "all" else deleted)
    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    for flag in hooks._SETTINGS.get("hub.py" if deleted == "all" else deleted, ())[:1]:
        refused = run(folder, "train.py", f"--{flag.replace('_', '-')}", "1")
        (line,) = refused.stderr.strip().splitlines()
        needed = "dbsl/extras/" + ("hub.py" if deleted == "all" else deleted)
        assert (refused.returncode, needed in line) == (2, True), line
    trained = run(folder, "train.py", *FIRST.split())
    assert trained.returncode == 0, trained.stderr
    assert (folder / "run/model.safetensors").exists()
    options = ("-q", "-n", "0", "-p", "no:cacheprovider")
    tested = run(folder, "-m", "pytest", *options, *CORE)
    assert tested.returncode == 0, tested.stdout
