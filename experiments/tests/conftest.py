"""The fixtures and options of the tests of `dbsl`."""

from tests.conftest import *  # noqa: F403
