"""Every setting that is a number, at values that nobody means: one line each."""

import math
import typing
from contextlib import suppress

import pytest

from dbsl.base.errors import SettingError
from dbsl.config.parse import parse_config
from dbsl.config.settings import check_effects
from tests.helpers import run, slow
from train import Config

NEVER = (math.nan, math.inf, -math.inf, 1e300, 10**30, 10**400)
HARDLY = (-1, 0, 1e-300, 10**15)

# What a setting is given with, or its place would be refused before its value.
TWO, SMALL = {"workers": 2}, {"workers": 4, "small_workers": 2}
STEP = TWO | {"sync": "step"}
PLACES = (
    (TWO, "floor intercept large_batch_size local_batch_sizes rounds_per_epoch slope"),
    (TWO, "small_ratio"),
    (SMALL, "min_batch_size small_batch_size time_ratio"),
    (STEP, "global_batch_size"),
    (TWO | {"sync": "ssp"}, "staleness"),
    ({"cache_gib": 1.0}, "shuffle_block"),
)
WITH = {name: settings for settings, names in PLACES for name in names.split()}


def kinds(hint):
    """Return the types that values of a type have, or the values of its lists."""
    return {hint}.union(*map(kinds, typing.get_args(hint)))


HINTS = {name: kinds(hint) for name, hint in typing.get_type_hints(Config).items()}
NAMES = [name for name, found in HINTS.items() if {int, float} & found]


def settings_of(name, value):
    is_list = any(typing.get_origin(kind) is tuple for kind in HINTS[name])
    return WITH.get(name, {}) | {name: (value,) if is_list else value}


@pytest.mark.parametrize("name", NAMES)
def test_a_number_that_nobody_means_is_refused_in_one_line_or_taken(name):
    for value in NEVER:
        with pytest.raises(SettingError, match=rf"^{name} must be [^\n]{{,200}}$"):
            Config(**settings_of(name, value))
    for value in HARDLY:
        with suppress(SettingError):  # anything else is a fault
            check_effects(Config(**settings_of(name, value)))


@slow
@pytest.mark.parametrize("value", HARDLY)
@pytest.mark.parametrize("name", NAMES)
def test_a_number_that_hardly_any_run_means_is_planned_or_refused(tmp_path, name, value):
    if int in HINTS[name] and float not in HINTS[name] and isinstance(value, float):
        return  # refused where flags are read
    with suppress(SettingError):
        run(tmp_path / "run", **{"epochs": 2, "plan_only": True, **settings_of(name, value)})


def test_a_whole_number_without_end_in_a_file_is_refused_in_one_line(tmp_path):
    (tmp_path / "c.yaml").write_text(f"seed: {'9' * 5001}\n")
    with pytest.raises(SettingError, match=r"^config must be a readable YAML file, got .*c.yaml"):
        parse_config(Config, ["--config", str(tmp_path / "c.yaml")])
