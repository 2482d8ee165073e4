"""Parts that a run can do without, each switched on by a flag."""
