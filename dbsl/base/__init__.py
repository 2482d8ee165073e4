"""Foundations of every package: errors, files, the machine, seeds."""
