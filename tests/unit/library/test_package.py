"""What other loops import: with torch and numpy alone, and nothing before it is used."""

import re
import subprocess
import sys

import pytest

import dbsl
from tests.helpers import ROOT

# What train.py needs and torch does not, by the names under which it is imported.
TRAINING = {
    *("accelerate", "torchvision", "timm", "datasets", "pyarrow", "wandb", "safetensors", "yaml"),
    *("huggingface_hub", "scipy", "PIL", "sklearn", "matplotlib", "psutil", "tqdm", "tensorboard"),
    *("pandas", "transformers", "lightning"),
}
BARRED = f"""
import sys
from importlib.machinery import PathFinder


class Without:
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] not in {TRAINING}:
            return PathFinder.find_spec(name, path, target)


sys.meta_path = [Without if finder is PathFinder else finder for finder in sys.meta_path]
import dbsl

assert not {{"torch", "numpy"}} & {{*sys.modules}}, "imported before it is used"
"""
USED = """
for name in dbsl.__all__:
    assert getattr(dbsl, name).__doc__
import torch
from torch.utils.data import DataLoader

sampler = dbsl.UnevenBatchSampler(10, 4, balance="dynamic")
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sampler.watch(model)
with dbsl.Rounds(model, optimizer) as rounds:
    for batch in DataLoader(torch.ones(10, 1), batch_sampler=sampler):
        (model(batch).mean() * sampler.scale(len(batch)) * dbsl.mean_scale(4)).backward()
        optimizer.step()
        rounds.step()
times = dbsl.measure_step(lambda size: model(torch.ones(size, 1)), [1, 2], seconds=0)
assert sum(dbsl.split_batch(9, [times.model, times.model]).local_batch_sizes) == 9
assert dbsl.plan_dual_batch(1000, 4, 1, 50, dbsl.TimeModel(1e-3, 1e-2)).small_batch_size
"""


def test_the_library_runs_with_torch_and_numpy_alone_and_imports_them_late():
    code = [sys.executable, "-W", "error", "-c", BARRED + USED]
    done = subprocess.run(code, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_every_public_name_is_listed_and_no_other_is_there():
    assert {*dbsl.__all__} <= {*dir(dbsl)}
    assert (ROOT / "dbsl/py.typed").exists(), "type checkers read the signatures"
    typed = re.findall(r"import (\w+) as \1\n", (ROOT / "dbsl/__init__.py").read_text())
    assert sorted(typed) == dbsl.__all__, "for who has a type checker: it reads no __getattr__"
    with pytest.raises(AttributeError, match="module 'dbsl' has no attribute 'Sampler'"):
        _ = dbsl.Sampler


def test_the_package_needs_what_train_needs_in_an_extra_alone():
    text = (ROOT / "pyproject.toml").read_text()
    needed = re.search(r"^dependencies = \[(.*)\]", text, re.MULTILINE)[1]
    assert re.findall(r'"(\w+)', needed) == ["numpy", "torch"]
    assert 'optional-dependencies.train = { file = ["requirements.txt"] }' in text


def test_package_citation_and_changelog_have_one_version_and_one_date():
    version = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)[1]
    assert version == dbsl.__version__
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.search(r"^version: (.*)$", citation, re.M)[1] == version
    date = re.search(r"^date-released: (.*)$", citation, re.M)[1]
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    released = [heading for heading in headings if heading != "Unreleased"]
    assert released[0] == f"{version} ({date})"
