"""Commands of README.md and docs/ do what their pages show, on little data and a small model."""

import re
import shlex
import sys
from dataclasses import fields
from importlib import import_module

import pytest
import yaml
from accelerate.state import AcceleratorState
from PIL import Image

import train
from dbsl.config.parse import parse_config, parse_flags, yaml_to_argv
from dbsl.tools.study.study import StudyConfig
from tests.helpers import ROOT, TINY, pages, run, short

TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text("utf-8") for page in pages()}
ELSEWHERE = {  # what other tests or .ci/run execute
    "pip install": ".ci/run",
    "pytest": ".ci/run",
    "git apply": "tests/loop/test_forks.py",
    "mkdir": "no command of ours",
    "tar": "no command of ours",
    "python -c": "no command of ours",
    "sbatch": "tests/unit/run/test_scripts.py",
    "python -m examples.ray_train": "needs Ray",
    "python -m experiments.benchmarks.gpu": "experiments/tests/test_gpu.py",
    "python -m experiments.compare": "experiments/tests/test_compare.py",
    "python -m dbsl.profile": "tests/unit/profile/test_profile.py",
}
SMALL = {**TINY, "dataset": "digits", "epochs": 1, "train_samples": 720, "mixed_precision": "no"}


def commands(block):
    """Return the commands of a block of lines, each as its words."""
    lines = block.replace("\\\n", " ").splitlines()
    words = (shlex.split(part, comments=True) for line in lines for part in line.split(" && "))
    return [each for each in words if each]


def blocks(name):
    """Return the blocks of commands on a page."""
    found = re.findall(r"```bash\n(.*?)```", TEXTS[name], re.DOTALL)
    indented = re.findall(r"(?:^    (?:python|DBSL|accelerate|torchrun).*\n)+", TEXTS[name], re.M)
    return found + indented


BLOCKS = [
    (name, number)
    for name in TEXTS
    if name == "README.md" or name.startswith("docs/")
    for number in range(len(blocks(name)))
]


def flags_of(words):
    """Return the flags of a command that ends in train.py and its flags; None: it does not."""
    if "train.py" not in words:
        return None
    return [word for word in words[words.index("train.py") + 1 :] if word != "..."]


def in_small(flags, processes):
    """Return flags that are added, so that a new run is small."""
    given = {word[2:].replace("-", "_") for word in flags if word.startswith("--")}
    changes = {k: v for k, v in SMALL.items() if k not in given - {"epochs", "dataset", "model"}}
    if any(flag.startswith("local-dir:") for flag in flags):
        del changes["model"], changes["resolutions"], changes["epochs"]
    if "small_workers" in given:  # a published setting
        changes |= {"large_batch_size": 8, "small_batch_size": 4, "dropout": 0.1}
        changes |= {"lr_milestones": [], "label_column": None}
    elif "config" in given:  # a recipe of large batches
        changes |= {"global_batch_size": 12, "warmup_epochs": 0}
    if "local_batch_sizes" not in given:
        changes |= {"workers": processes} if processes > 1 else {}
    if "pretrained" in given:  # no download
        changes["pretrained"] = False
    return yaml_to_argv(changes)


def call(words):
    """Do what a command does, in this process and in small."""
    flags = flags_of(words)
    if flags is not None and "torchrun" not in words:
        place = words[words.index("--config_file") + 1] if "--config_file" in words else None
        processes = yaml.safe_load((ROOT / place).read_text())["num_processes"] if place else 1
        resumed = "--resume" in flags and flags[flags.index("--resume") + 1] != "auto"
        more = [] if resumed else in_small(flags, processes)
        AcceleratorState._reset_state(True)
        config = parse_config(train.Config, flags + more)
        if "--cache-gib" not in flags:  # tests/loop/test_runs_on_shards.py has shards
            train.main(config)
    elif flags is not None:  # tests/loop/test_nodes.py launches
        parse_config(train.Config, flags)
    elif words[:3] == ["python", "-m", "dbsl.study"]:  # tests/unit/study runs studies
        assert parse_flags(StudyConfig, words[3:]).goal_error == 0.3
    elif words[:2] == ["python", "-m"] and words[2] in ("dbsl.plan", "dbsl.predict"):
        tool = import_module(words[2].replace("dbsl", "dbsl.tools"))
        assert not tool.main(words[3:])
    else:
        assert any(" ".join(words).startswith(start) for start in ELSEWHERE), words


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with what the pages take for granted."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    for name in ("configs", "examples", "experiments"):
        (tmp_path / name).symlink_to(ROOT / name)
    labelled = [f"path/to/others/{label}/one.png" for label in range(2)]
    for file in ("photo.jpg", "folder/one.jpg", *labelled):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), 99).save(tmp_path / file)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "number"),
    short(BLOCKS, *[b for b in BLOCKS if b[0] in ("README.md", "docs/planning.md")]),
)
def test_the_commands_of_a_page_run(place, name, number):
    text = blocks(name)[number].replace("s3://bucket", f"file://{place}/bucket")
    each = commands(text)
    if re.search("(--resume|local-dir:|predict) ?runs/x", text) and "--output-dir" not in text:
        run(place / "runs/x", dataset="digits", small_ratio=0.25, lr_milestones=(), epochs=1)
    for words in each:
        call(words)


def test_readme_prints_the_plan_of_the_command_above_it(place, capsys):
    before, _, plan = TEXTS["README.md"].partition("```text\n")
    (words,) = commands(re.findall(r"```bash\n(.*?)```", before, re.DOTALL)[-1])
    times = re.search("`(--slope .*?)`, give for 1,437 images", before)[1].split()
    here = ["--dataset", "digits", "--model", "test_resnet", "--no-pretrained", "--workers", "2"]
    AcceleratorState._reset_state(True)
    train.main(parse_config(train.Config, flags_of(words) + times + here))
    printed = capsys.readouterr().out
    assert all(line in printed for line in plan.partition("```")[0].splitlines())


def test_there_are_commands_of_every_kind():
    each = [words for name, number in BLOCKS for words in commands(blocks(name)[number])]
    assert sum(flags_of(words) is not None for words in each) > 10
    assert {" ".join(words[:3]) for words in each} >= {"python -m dbsl.plan", "pip install -r"}


@pytest.mark.parametrize("name", [name for name in TEXTS if name.startswith(("README", "docs/"))])
def test_flags_in_the_text_of_a_page_are_flags(name):
    known = {field.name for field in fields(train.Config)} | {"config", "help"}
    known |= {"max_restarts", "master_addr"}  # the launchers'
    known |= {"gpu", "ray_workers"}  # examples/ray_train.py's
    folders = ("dbsl/tools", "experiments/compare")
    files = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    tools = "".join(path.read_text("utf-8") for path in files)
    spans = re.findall(r"`([^`\n]*)`", re.sub(r"```.*?```", "", TEXTS[name], flags=re.DOTALL))
    own = [span for span in spans if not span.startswith(("torchrun", "accelerate launch"))]
    for flag in re.findall(r"(?<!\S)--([a-z][\w-]*)", " ".join(own)):
        word = flag.replace("-", "_").removeprefix("no_")
        assert word in known or word in tools, flag
