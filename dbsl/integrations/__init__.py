"""Uneven batches in other libraries' training loops; each module needs the library it names."""
