"""Data larger than the disk: row groups of parquet shards through a cache of a fixed size."""
