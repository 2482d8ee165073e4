"""Hostile values: each is refused in one line, or has a meaning."""

import math
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Literal, get_args, get_origin, get_type_hints

import numpy as np

import dbsl
from dbsl.base.errors import SettingError
from dbsl.config.complete import with_found
from dbsl.config.hooks import Extra, Extras
from dbsl.config.parse import parse_config
from dbsl.extras.charts import tracker_names
from dbsl.optimizer import check_optimizer
from dbsl.plan.stages import make_stages
from train import Config

FLAGS = ["", " ", "nan", "-inf", "-1", "1e400", "9" * 30, "true", "\0", "a\nb", "{}", "1" * 400]
NO_FLAGS = ["{}", "{a: 1}", "[[1]]", "[true]", "[null]", "!!binary aGk=", "!!set {a}", '"\\0"']
YAMLS = [*NO_FLAGS, "[]", "'false'", "'no'", "''", ".nan", "1e999"]
VALUES = [None, "", "3", "False", b"3", True, 1j, math.nan, -math.inf, -1, 0, 2.5, 10**400, 1e300]
VALUES += [
    [[1], [1, 2]],
    10**9,
    [],
    {},
    object(),
    [None],
    np.uint8(200),
    np.float64("nan"),
    np.array([]),
    np.array("1"),
]
NAMES = [field.name for field in fields(Config) if field.metadata.get("flag", True)]
SINGLE = SimpleNamespace(num_processes=1)
GOOD = dbsl.TimeModel(0.001, 0.01)


def tried(make, *given, **named):
    """Return what a call returns; None: it refused in one line of a length that can be read."""
    try:
        return make(*given, **named)
    except SettingError as refused:
        text = str(refused)
        assert len(text) < 1000, text
        assert text.isprintable(), text
        return None


def held(hint, value):
    """Whether a value is of a type, and has a meaning."""
    if get_origin(hint) in (None, Literal):
        if isinstance(value, str):
            return hint is str or value in get_args(hint)
        return value in get_args(hint) or (type(value) in (hint, int) and abs(value) < 1e16)
    if get_origin(hint) is tuple:
        return type(value) is tuple and all(held(get_args(hint)[0], one) for one in value)
    return value is None or any(held(arm, value) for arm in get_args(hint))


def read(flags):
    """Return settings that are taken by all that reads them before there are data and a model."""
    config = parse_config(Config, flags)
    make_stages(config.epochs, config.resolutions or (24,), milestones=config.lr_milestones or ())
    check_optimizer(config.optimizer, config.optimizer_settings)
    Extras.of(config).first(Extra.machine, replace(config, workers=8), SINGLE)
    tracker_names(config.report_to)
    return config


def test_a_hostile_flag_is_refused_in_one_line_or_has_a_meaning():
    hints = get_type_hints(Config)
    for name in NAMES:
        for value in FLAGS:
            config = tried(read, [f"--{name}={value}"])
            sane = config and hints[name] is not bool and held(hints[name], getattr(config, name))
            assert config is None or sane, (name, value)


def test_a_hostile_yaml_file_is_refused_in_one_line_or_has_a_meaning(tmp_path):
    hints, file = get_type_hints(Config), tmp_path / "config.yaml"
    for name in NAMES:
        for value in YAMLS:
            file.write_text(f"{name}: {value}\n", encoding="utf-8")
            config = tried(read, ["--config", str(file)])
            sane = config and value not in NO_FLAGS and held(hints[name], getattr(config, name))
            assert config is None or (sane and hints[name] is not bool), (name, value)
    for value in YAMLS:
        file.write_text(f"found: {{lr: {value}, processes: 1}}\n", encoding="utf-8")
        assert tried(lambda: with_found(parse_config(Config, ["--config", str(file)]))) is None


def test_hostile_arguments_of_public_functions_are_refused_in_one_line_or_have_a_meaning():
    plan = {"samples": 9000, "workers": 4, "small_workers": 1, "large_batch_size": 100}
    plan |= {"time_model": GOOD, "rules": dbsl.PlanRules()}
    for value in VALUES:
        for name, hint in get_type_hints(dbsl.PlanRules).items():
            rules = tried(dbsl.PlanRules, **{name: value})
            assert rules is None or held(hint, getattr(rules, name)), (name, value)
            made = rules and tried(dbsl.plan_dual_batch, **plan | {"rules": rules})
            assert not made or sum(w.samples for w in made.workers) == 9000, (name, value)
        for name in ("slope", "intercept", "floor"):
            model = tried(dbsl.TimeModel, **{"slope": 0.1, "intercept": 0.1, name: value})
            assert model is None or math.isfinite(model.time(10**9)), (name, value)
        for name in plan:
            made = tried(dbsl.plan_dual_batch, **plan | {name: value})
            assert not made or (math.isfinite(made.time_s) and made.time_s > 0), (name, value)


def test_there_are_many():
    names = len(get_type_hints(dbsl.PlanRules)) + 3 + 6
    assert len(NAMES) * (len(FLAGS) + len(YAMLS)) + names * len(VALUES) > 2000
