"""Arms of a comparison, trained and tabled with intervals: ``python -m dbsl.compare``."""
