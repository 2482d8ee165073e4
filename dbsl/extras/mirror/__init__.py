"""A copy of the run folder at a URL, kept up to date, and runs that begin from one."""
