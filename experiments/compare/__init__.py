"""Arms of a comparison, trained and tabled with intervals: ``python -m experiments.compare``."""
