"""Bounds of settings."""

import math
import operator
import re
from dataclasses import dataclass
from typing import Annotated

import pytest

from dbsl.base.errors import SettingError
from dbsl.config.fields import Excludes, Needs, Within, check_fields, check_needs, markers
from train import Config


@dataclass
class Settings:
    share: Annotated[float | None, Within(0, 1)] = None
    sizes: Annotated[tuple[int, ...] | None, Within(1)] = None
    rates: tuple[float, ...] = ()  # no bounds of their own
    ends: Annotated[tuple[float, ...] | None, Within(0, lengths=(2,), order=operator.lt)] = None


def test_whole_numbers_are_held_against_their_bounds_exactly():
    seed = Within(0, 2**63 - 1)
    seed.check("seed", 2**63 - 1)
    seed.check("seed", 1_700_000_000_123_456_789)  # of date +%s%N
    message = r"^seed must be in \[0, 9223372036854775807\], got 9223372036854775808$"
    with pytest.raises(SettingError, match=message):
        seed.check("seed", 2**63)


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
