"""The flags of a training script: those of the core and all extras."""

from __future__ import annotations

from dataclasses import dataclass

from dbsl.base.seeds import stream_seed
from dbsl.config.hooks import settings_of_extras
from dbsl.config.parse import parse_config
from dbsl.config.settings import RunConfig


@dataclass(frozen=True)
class Settings(*settings_of_extras(), RunConfig):
    """Settings of a run; a field of yours in a class derived from it is a flag, too."""

    @classmethod
    def from_flags(cls) -> Settings:
        """Return the settings from the command line, or from a file or run that it names."""
        return parse_config(cls)

    def stream(self, purpose: str) -> int:
        """Return the seed of a random stream for one purpose."""
        return stream_seed(self.seed, purpose)
