"""A run's output: metrics and lines."""
