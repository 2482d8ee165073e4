"""Saving a run, and going on with it, also with other workers."""
