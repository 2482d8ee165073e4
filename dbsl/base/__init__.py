"""Ground that every room stands on: errors, files, flags, seeds."""
