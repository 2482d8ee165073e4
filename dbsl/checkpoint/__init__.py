"""Saving and resuming a run, also with other workers."""
