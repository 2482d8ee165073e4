"""Find the useful batch sizes: ``python -m dbsl.study``."""
