"""The recipes are the published ones, and timm's options are where the table says."""

from collections import ChainMap
from dataclasses import fields, replace

import pytest

import train
from dbsl.config.parse import parse_config
from experiments.plots.rows import read
from tests.helpers import ROOT, fingerprint, slow, stopped_at_step

OPTIONS = read(ROOT / "experiments/results/timm_options.csv")
HERE = {row["option"]: row["here"] for row in OPTIONS}

# By the names of timm's train.py. A3: arXiv 2110.00476, Table 2.
A3 = {
    **{"--model": "resnet50", "--img-size": (160,), "--epochs": 100, "--opt": "lamb", "--lr": 8e-3},
    **{"--weight-decay": 0.02, "--sched": "cosine", "--warmup-epochs": 5, "--bce-loss": True},
    **{"--mixup": 0.1, "--cutmix": 1.0, "--aa": "rand-m6-mstd0.5-inc1", "--hflip": 0.5},
    **{"--smoothing": 0.0, "--drop": (0.0,), "--drop-path": None, "--aug-repeats": 1},
    **{"--reprob": 0.0, "--model-ema": 0.0, "--crop-pct": 0.95, "--warmup-prefix": False},
    **{"--bce-target-thresh": 0.2},
}
# facebookresearch/deit at HEAD, README_revenge.md line 81 and the defaults of its main.py;
# --ThreeAugment is timm's policy 3a, deit_small_patch16_LS timm's deit3_small_patch16_224.
DEIT3 = {
    **{"--model": "deit3_small_patch16_224", "--img-size": (224,), "--epochs": 800},
    **{"--opt": "lamb", "--opt-eps": 1e-8, "--opt-betas": None, "--lr": 4e-3, "--min-lr": 1e-5},
    **{"--weight-decay": 0.05, "--sched": "cosine", "--warmup-epochs": 5, "--warmup-lr": 1e-6},
    **{"--clip-grad": None, "--smoothing": 0.0, "--drop": (0.0,), "--drop-path": 0.05},
    **{"--mixup": 0.8, "--cutmix": 1.0, "--mixup-prob": 1.0, "--mixup-switch-prob": 0.5},
    **{"--mixup-mode": "batch", "--cutmix-minmax": None, "--bce-loss": True, "--aa": "3a"},
    **{"--bce-target-thresh": None, "--color-jitter": (0.3,), "--reprob": 0.0, "--aug-repeats": 3},
    **{"--train-interpolation": "bicubic", "--crop-pct": 1.0, "--warmup-prefix": False},
}
SMALL = {"dataset": "digits", "train_samples": 48, "eval_samples": 10, "loader_workers": 0}
SMALL |= {"slope": (0.001,), "intercept": (0.01,), "report_to": "none", "cpu_threads": 1}
RECIPES = {"a3": A3, "deit3_small": DEIT3}


def recipe(name):
    return parse_config(train.Config, ["--config", str(ROOT / f"configs/recipes/{name}.yaml")])


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_each_published_setting(name):
    config = recipe(name)
    for option, value in RECIPES[name].items():
        flag, _, argument = HERE[option][2:].replace("-", "_").partition(" ")
        found = getattr(config, flag)
        if argument:
            of_all = (config.given_to_augment, config.curve, config.mixing, config.bce)
            more = (config.optimizer_settings, config.model_settings)
            found = ChainMap(*of_all, *more).get(argument)
        assert found == value, option
    assert (config.sync, config.global_batch_size) == ("step", 2048)


def test_each_of_timms_options_is_a_flag_here_or_has_a_reason():
    flags = {f"--{field.name.replace('_', '-')}" for field in fields(train.Config)} | {"--config"}
    assert len(OPTIONS) == len(HERE) == 173
    for row in OPTIONS:
        known = row["here"].partition(" ")[0] in flags | {"always"}
        assert known or (not row["here"] and row["note"]), row
    assert sum(map(bool, HERE.values())) >= 0.6 * len(OPTIONS)


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"global_batch_size": 8}, "(root) gives --lr 0.0005 --lr-batch-size 8"),
        ({"global_batch_size": 8, "optimizer": "sgd"}, "(linear) gives --lr 3.13e-05 --lr-batch"),
        ({"global_batch_size": 8, "lr": 0.001, "lr_batch_size": 8}, None),
        ({"global_batch_size": 8, "lr_batch_size": None}, None),
    ],
)
def test_a_rate_for_other_batches_is_kept_and_told_with_timms_rule(capsys, settings, advice):
    tiny = {**SMALL, "model": "test_resnet", "resolutions": (16,), "plan_only": True}
    train.main(replace(recipe("a3"), **tiny | settings))
    said = capsys.readouterr().out
    assert ("warning" in said) == (advice is not None)
    if advice:
        assert "warning: lr 0.008 was chosen for 2048 samples a step, which are 8 here" in said
        assert advice in said


@pytest.mark.parametrize("name", ["a3", pytest.param("deit3_small", marks=slow)])
def test_a_recipe_in_small_goes_on_to_the_same_bits(tmp_path, name):
    config = replace(
        recipe(name),
        **{**SMALL, "model": "test_resnet" if name == "a3" else "test_vit", "epochs": 2},
        **{"resolutions": (16, 32), "global_batch_size": 12, "warmup_epochs": 0.5},
        mixed_precision="no",
    )
    train.main(replace(config, output_dir=str(tmp_path / "whole")))
    parts = replace(config, output_dir=str(tmp_path / "parts"))
    with stopped_at_step(6):  # inside the second epoch
        train.main(parts)
    train.main(replace(parts, resume="auto"))
    assert fingerprint(tmp_path / "parts") == fingerprint(tmp_path / "whole")
