"""Measurements behind the numbers in the README; each module is a command."""
