"""The part of this project for your own training loop: use ``import dbsl``."""
