"""Parts of a training loop in which every worker has its own batch size."""

__version__ = "0.1.0"
