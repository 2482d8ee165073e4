"""Every config and example parses, and trains a few steps at a tiny size."""

import json
import os
import re
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

import train
from dbsl.config.parse import parse_config, parse_flags, read_settings
from dbsl.plan.solve import PlanRules, TimeModel, plan_dual_batch
from tests.helpers import ROOT, TINY, short, summary_of, to_flags

CONFIGS = sorted(
    path.relative_to(ROOT)
    for folder in ("configs", "examples", "experiments/configs")
    for path in (ROOT / folder).rglob("*.yaml")
    if path.parent.name != "clusters"  # jobs of schedulers
)
PAPERS = (ROOT / "docs/papers.md").read_text("utf-8")
# One of each method and model; what the others differ in shows when they are parsed.
TRAINED = {"mini/dual_3_k105", "mini/hybrid", "cifar100/ddp_512", "digits/first_command"}


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def in_short_set(path):
    return path.parts[0] == "examples" or "/".join(path.with_suffix("").parts[-2:]) in TRAINED


def shrunk(config, tmp_path):
    """Return the config with little data, a small model and two epochs; the method stays."""
    sides = (16, 24, 32)[-len(config.resolutions or (0, 0)) :]
    vit = config.model.partition("_")[0] == "vit" or config.model == "test_vit"
    changes = TINY | {"dataset": "digits", "image_column": None, "label_column": None}
    changes |= {"model": "test_vit" if vit else "test_resnet", "pretrained": False, "profile": None}
    changes |= {"train_samples": 160, "eval_train": False, "mixed_precision": "no"}
    changes |= {"resolutions": sides, "rounds_per_epoch": min(config.rounds_per_epoch, 4)}
    changes |= {"epochs": len(sides), "lr": 0.001, "lr_milestones": (), "warmup_epochs": None}
    changes |= {"checkpoint_every": 0, "output_dir": str(tmp_path / "run")}
    if config.local_batch_sizes is not None:
        changes["local_batch_sizes"] = tuple(min(size, 16) for size in config.local_batch_sizes)
    if config.global_batch_size is not None:
        changes["global_batch_size"] = 24
    else:
        changes["large_batch_size"] = (8,)
        some_small = config.small_ratio or config.small_workers
        changes["small_batch_size"] = (4,) if some_small else None
    return replace(config, **changes)


def test_there_are_configs_of_every_table():
    folders = {path.parent.as_posix() for path in CONFIGS}
    run = {"gap", "mini", "beyond", "beyond_imagenette", "causes", "digits", "vit", "base"}
    published = {"cifar100", "cifar100_conference", "imagenet", "base"}
    assert {f"experiments/configs/{name}" for name in run} <= folders
    assert {f"configs/{name}" for name in published} <= folders
    assert sum(path.parts[0] == "examples" for path in CONFIGS) >= 4
    assert sum(map(in_short_set, CONFIGS)) >= len(TRAINED) + 4


def published_settings():
    """Yield the flags of each setting on the page of papers, and its small batches if it has."""
    for row in re.findall(r"\| `([\w/]+\.yaml[^`]*)` \|(.*)", PAPERS):
        flags, (counts, sizes, *_) = row[0], [*row[1].split("|"), ""]
        if "N" not in flags.split():
            yield flags, None
            continue
        first, last = map(int, counts.split(" to "))
        of_resolutions = [[*map(int, part.split(","))] for part in sizes.split(";")]
        for place, count in enumerate(range(first, last + 1)):
            yield flags.replace("N", str(count)), tuple(part[place] for part in of_resolutions)


SETTINGS = [*published_settings()]


def test_the_page_has_every_published_setting_and_uses_every_file():
    assert len(SETTINGS) == 4 + 4 + 3 + 3 + 4 * 4 + 5 + 6
    files = {flags.split()[0] for flags, _ in SETTINGS}
    folders = ("cifar100", "cifar100_conference", "imagenet")
    assert files == {f"{p.parent.name}/{p.name}" for p in CONFIGS if p.parts[1] in folders}


@pytest.mark.parametrize(("flags", "small_batch_sizes"), SETTINGS)
def test_a_published_setting_is_one_command_and_gives_the_published_plan(flags, small_batch_sizes):
    file, *more = flags.split()
    config = parse_config(train.Config, ["--config", str(ROOT / "configs" / file), *more])
    if small_batch_sizes is None:
        return
    samples = 1281167 if file.startswith("imagenet") else 50000
    rules = PlanRules(time_ratio=config.time_ratio, rounding=config.rounding)
    lines = zip(config.large_batch_size, config.slope, config.intercept, strict=True)
    plans = [
        plan_dual_batch(samples, 4, config.small_workers, size, TimeModel(*line), rules)
        for size, *line in lines
    ]
    assert len(plans) == len(config.resolutions)
    assert tuple(plan.small_batch_size for plan in plans) == small_batch_sizes


@pytest.mark.parametrize("path", CONFIGS, ids=str)
def test_config_parses_and_sets_something(path):
    config = parse_config(train.Config, ["--config", str(ROOT / path)])
    assert config != train.Config()


@pytest.mark.parametrize("path", short(CONFIGS, *filter(in_short_set, CONFIGS)), ids=str)
def test_config_trains_a_few_steps(tmp_path, path):
    config = parse_config(train.Config, ["--config", str(ROOT / path)])
    train.main(shrunk(config, tmp_path))
    summary = summary_of(tmp_path / "run")
    assert summary["samples_seen"] == 160 * summary["epochs"]
    if config.small_workers is not None:
        assert summary["small_workers"] == config.small_workers
    assert summary["sync"] == config.sync


def test_an_image_folder_is_read_as_its_example_says(tmp_path):
    generator = np.random.default_rng(0)
    for split, count in (("train", 6), ("validation", 2)):
        for label in ("cats", "dogs"):
            folder = tmp_path / "photos" / split / label
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = generator.integers(0, 255, (40 + number, 50, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.jpg")
    settings = {"dataset": "photos", "train_samples": None, "eval_samples": None, "epochs": 2}
    settings |= {"pretrained": False, "resolutions": (32, 48), "lr_milestones": (1,)}
    settings |= {"large_batch_size": 2, "small_batch_size": 1, "loader_workers": 0}
    config = ["--config", str(ROOT / "examples/image_folder.yaml")]
    train.main(parse_config(train.Config, config + to_flags("run", **settings)))
    summary = summary_of(tmp_path / "run")
    assert (summary["samples_seen"], summary["small_workers"]) == (24, 2)
    assert json.loads((tmp_path / "run/config.json").read_text())["num_classes"] == 2


def test_a_base_is_read_first_from_beside_its_file(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "first.yaml").write_text("lr: 0.1\nepochs: 3\nworkers: 2\n")
    (tmp_path / "deep/second.yaml").write_text("base: ../first.yaml\nlr: 0.2\nepochs: 4\n")
    (tmp_path / "third.yaml").write_text("base: deep/second.yaml\nepochs: 5\nworkers: null\n")
    os.chdir("/")
    assert read_settings(tmp_path / "third.yaml") == {"lr": 0.2, "epochs": 5, "workers": None}
    config = parse_config(train.Config, ["--config", str(tmp_path / "third.yaml")])
    assert (config.lr, config.epochs, config.workers) == (0.2, 5, None)
    assert parse_flags(train.Config, []).workers is None


def test_null_takes_back_what_a_resumed_run_has_set(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text("max_minutes: 5\nepochs: 3\nsave_best: true\n")
    (tmp_path / "base.yaml").write_text("no_save_best: true\n")
    (tmp_path / "more.yaml").write_text("base: base.yaml\nmax_minutes: null\nsave_best: true\n")
    words = ["--resume", str(tmp_path / "run"), "--config", str(tmp_path / "more.yaml")]
    config = parse_config(train.Config, words)
    assert (config.max_minutes, config.epochs, config.save_best) == (None, 3, True)


@pytest.mark.parametrize(
    ("first", "message"),
    [
        ("epocs: 3\n", "config must set what --help lists, such as epochs, got epocs in {}"),
        ("img_size: 3\n", "config must set .* got img_size in {}, which is --resolutions here"),
        ("base: nowhere.yaml\n", "config must be a readable YAML file, got .*nowhere.yaml"),
        ("base: second.yaml\n", "base must not lead back to its own file, got .*second.yaml"),
    ],
)
def test_what_is_wrong_in_a_base_is_told_with_its_file(tmp_path, first, message):
    (tmp_path / "first.yaml").write_text(first)
    (tmp_path / "second.yaml").write_text("base: first.yaml\nlr: 0.1\n")
    with pytest.raises(ValueError, match=f"^{message.format(tmp_path / 'first.yaml')}"):
        parse_config(train.Config, ["--config", str(tmp_path / "second.yaml")])
