"""Bounds of settings."""

import math
from dataclasses import dataclass
from typing import Annotated

import pytest

from dbsl.base.errors import SettingError
from dbsl.config.fields import Within, check_fields, in_range


@dataclass
class Settings:
    share: Annotated[float | None, Within(0, 1)] = None
    sizes: Annotated[tuple[int, ...] | None, Within(1)] = None
    rates: tuple[float, ...] = ()  # no bounds of their own


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (math.inf, "finite, got inf"),
        (-math.inf, "finite, got -inf"),
        (1e39, r"at most 1e\+15, got 1e\+39"),
        (10**400, r"at most 1e\+15, got one of 401 digits"),
        (math.nan, "finite, got nan"),
    ],
)
def test_no_setting_is_beyond_what_arithmetic_holds(value, message):
    with pytest.raises(SettingError, match=f"^rates must be {message}$"):
        check_fields(Settings(rates=(0.1, value)))
    in_range("seconds", 1e15)


def test_not_a_number_is_within_no_bounds():
    with pytest.raises(SettingError, match=r"^share must be in \[0, 1\], got nan$"):
        check_fields(Settings(share=math.nan))


def test_whole_numbers_are_held_against_their_bounds_exactly():
    seed = Within(0, 2**63 - 1)
    seed.check("seed", 2**63 - 1)
    seed.check("seed", 1_700_000_000_123_456_789)  # of date +%s%N
    message = r"^seed must be in \[0, 9223372036854775807\], got 9223372036854775808$"
    with pytest.raises(SettingError, match=message):
        seed.check("seed", 2**63)


def test_a_list_with_bounds_has_a_number_at_least():
    with pytest.raises(SettingError, match=r"^sizes must have a value, got none$"):
        check_fields(Settings(sizes=()))
    check_fields(Settings(rates=()))
