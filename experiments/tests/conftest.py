"""The fixtures and rules of the tests of `dbsl`."""

from tests.conftest import *  # noqa: F403

del pytest_addoption  # noqa: F821  # an option is added once, where both folders are tested
