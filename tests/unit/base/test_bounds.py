"""Bounds of settings."""

import math

import pytest

from dbsl.base.bounds import in_range


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_no_bound_lets_infinity_pass(value):
    with pytest.raises(ValueError, match=f"^seconds must be finite, got {value}$"):
        in_range("seconds", value)
    in_range("seconds", 1e300)


def test_not_a_number_is_within_no_bounds():
    with pytest.raises(ValueError, match=r"^seconds must be in \[0, 1\), got nan$"):
        in_range("seconds", math.nan, 0, 1, open_high=True)
