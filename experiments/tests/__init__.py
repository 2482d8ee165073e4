"""Tests of what measures, apart from those of `dbsl`: `pytest experiments/tests`."""
