"""Bounds of settings."""

import math
import operator
import re
from dataclasses import dataclass
from typing import Annotated, get_type_hints

import pytest

from dbsl.base.errors import SettingError
from dbsl.config import fields
from dbsl.config.fields import Excludes, Needs, Within, check_fields, check_needs, markers
from dbsl.config.parse import parse_config
from train import Config

# Every setting that has bounds, and values beyond them.
BOUNDS = {
    ("at least 0", "-1"): "loader_workers max_bad_images mixup cutmix weight_decay small_workers "
    "small_batch_size staleness warmup_epochs log_every keep_checkpoints max_bad_rounds",
    ("at least 1", "0"): "train_samples eval_samples large_batch_size "
    "local_batch_sizes global_batch_size micro_batch_size min_batch_size "
    "rounds_per_epoch eval_batch_size eval_every shuffle_block",
    ("above 0", "0"): "clip_grad lr lr_gamma max_minutes cache_gib",
    ("above 1", "1"): "time_ratio",
    ("in [0, 1]", "-0.1 1.1"): "small_ratio",
    ("in [0, 1)", "-0.1 1"): "momentum dropout ema_decay label_smoothing",
    ("in (0, 1)", "0 1"): "holdout",
    ("in (0, 1e+09]", "0 2e+09"): "worker_timeout",
    ("in [1, 1000000]", "0 1000001"): "epochs",
    ("in [1, 1024]", "0 1025"): "cpu_threads",
    ("in [1, 65536]", "0 65537"): "workers worker_processes",
    ("in [0, 9223372036854775807]", "-1 9223372036854775808"): "seed",
}


@dataclass
class Settings:
    share: Annotated[float | None, Within(0, 1)] = None
    sizes: Annotated[tuple[int, ...] | None, Within(1)] = None
    rates: tuple[float, ...] = ()  # no bounds of their own
    ends: Annotated[tuple[float, ...] | None, Within(0, lengths=(2,), order=operator.lt)] = None


@pytest.mark.parametrize(("bound", "beyond"), BOUNDS)
def test_every_bound_of_a_setting_is_held_and_named_with_the_value(bound, beyond):
    for name in BOUNDS[bound, beyond].split():
        for value in beyond.split():
            message = re.escape(f"{name} must be {bound}, got {value}")
            with pytest.raises(SettingError, match=f"^{message}$"):
                parse_config(Config, [f"--{name}={value}"])


def test_every_setting_with_bounds_is_among_those_and_every_choice_is_held():
    assert {name for name, _ in markers(Config, Within)} == {*" ".join(BOUNDS.values()).split()}
    choices = {n: hint for n, hint in get_type_hints(Config).items() if "Literal[" in str(hint)}
    assert len(choices) == 12
    for name, hint in choices.items():
        must = f"--{name.replace('_', '-')} must be {fields.described(hint)[0]}, got 'nonsense'"
        with pytest.raises(SettingError, match=f"^{re.escape(must)}$"):
            parse_config(Config, [f"--{name}", "nonsense"])


def test_whole_numbers_are_held_against_their_bounds_exactly():
    for seed in (2**63 - 1, 1_700_000_000_123_456_789):  # the latter of date +%s%N
        assert Config(seed=seed).seed == seed


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rates": (0.1, math.inf)}, "rates must be finite, got inf"),
        ({"rates": (0.1, -math.inf)}, "rates must be finite, got -inf"),
        ({"rates": (0.1, math.nan)}, "rates must be finite, got nan"),
        ({"rates": (0.1, 1e39)}, "rates must be at most 1e+15, got 1e+39"),
        ({"rates": (0.1, 10**400)}, "rates must be at most 1e+15, got one of 401 digits"),
        ({"share": math.nan}, "share must be in [0, 1], got nan"),
        ({"sizes": ()}, "sizes must have a value, got none"),
        ({"ends": (0.5, 0.2)}, "ends must ascend, got 0.5,0.2"),
        ({"ends": (0.5,)}, "ends must have 2 values, got 1"),
    ],
)
def test_a_value_beyond_its_bounds_is_refused(given, message):
    with pytest.raises(SettingError, match=f"^{re.escape(message)}$"):
        check_fields(Settings(**given))
    check_fields(Settings(rates=(1e15,)))


@dataclass
class Needy:
    sync: str = "bsp"
    gbps: float | None = None
    delay: Annotated[float, Needs("gbps")] = 0.0
    overlap: Annotated[float, Needs("gbps", sync="step")] = 0.0
    last: Annotated[bool, Needs(sync="step") | Needs(sync=("ssp", "asp"))] = False
    ahead: Annotated[int, Needs(sync="ssp", new=True)] = 1
    small: Annotated[int | None, Excludes("delay"), Excludes(sync="asp", why=": all do")] = None
    merge: Annotated[str | None, Excludes(sync="bsp", but=("mean", "delta"))] = None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"delay": 1.0}, "delay must be 0.0 except with gbps, got 1.0"),
        ({"overlap": 0.5, "gbps": 1.0}, "overlap must be 0.0 except with gbps and sync step"),
        ({"last": True}, "last must be false except with sync step or sync ssp or asp, got true"),
        ({"small": 1, "delay": 1.0, "gbps": 1.0}, "small must be unset with delay, got 1"),
        ({"small": 1, "sync": "asp"}, "small must be unset with sync asp: all do, got 1"),
        ({"merge": "half"}, "merge must be mean or delta with sync bsp, got half"),
    ],
)
def test_a_setting_that_does_not_go_with_others_is_refused(given, message):
    with pytest.raises(SettingError, match=f"^{re.escape(message)}"):
        check_fields(Needy(**given))


def test_a_setting_with_what_it_needs_is_taken_and_one_without_effect_where_a_run_goes_on():
    check_fields(Needy(gbps=1.0, delay=1.0, overlap=0.5, sync="step", last=True))
    check_fields(Needy(sync="asp", last=True, merge="half", small=0))  # 0 is off
    check_fields(Needy(small=1, delay=0.0, merge="delta", ahead=3))
    check_needs(Needy(ahead=3, sync="ssp"), new=True)
    with pytest.raises(SettingError, match=r"^ahead must be 1 except with sync ssp, got 3$"):
        check_needs(Needy(ahead=3), new=True)


def test_what_a_setting_needs_is_a_setting():
    for _, needs in markers(Config, Needs):
        assert needs.are_met(Config()) in (True, False)
