"""Which batch size is worth having: ``python -m dbsl.study``."""
