"""Arms of settings against each other, by seed, at equal epochs or equal time."""
