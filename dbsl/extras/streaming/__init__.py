"""Data larger than the disk: row groups of parquet shards through a cache of a fixed size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from dbsl.config.fields import Needs, Role, Within
from dbsl.config.hooks import Extra
from dbsl.config.settings import RunConfig
from dbsl.extras.streaming.streaming import Streams
from dbsl.run.session import Session

SHUFFLE_BLOCK = 8192  # images: 82 row groups of the 100 that `datasets` writes


@dataclass(frozen=True)
class StreamSettings(RunConfig):
    """Whether data are read in row groups as they are needed."""

    # --- data
    # GiB of disk for data that may be larger: parquet shards (a folder, a URL or a hub id) are read
    # by row group into a cache of that size; unset: the whole data set is on the disk
    cache_gib: Annotated[float | None, Within(0, open_low=True), Role.ORDER | Role.DATA] = None
    # images that are shuffled together, with --cache-gib; more are shuffled better, and need a
    # larger cache
    shuffle_block: Annotated[int, Within(1), Role.ORDER | Role.DATA, Needs("cache_gib")] = (
        SHUFFLE_BLOCK
    )


class Streaming(Extra):
    """Reads data in row groups."""

    Settings = StreamSettings

    @classmethod
    def of(cls, config: StreamSettings) -> Streaming | None:
        """Return it where there is to be a cache."""
        return None if config.cache_gib is None else cls()

    def data(self, config: StreamSettings) -> Streams:
        """Return what opens shards."""
        return Streams(config.cache_gib, config.shuffle_block)

    def begin(self, session: Session) -> None:
        """Refuse a cache without room for the images that are read at once."""
        run = session.run
        config, data = run.config, run.data
        in_order = run.evaluation_batch if getattr(config, "eval_train", False) else 0
        average = run.statistics_batch if getattr(config, "ema_decay", 0) else 0
        data.train.check_room(max(run.largest_batch, average), in_order=in_order)
        data.evaluation.check_room(1, in_order=run.evaluation_batch)
