"""``--push-to-hub``: a finished run's model on the Hugging Face hub, by timm's own function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from dbsl.base.errors import in_line
from dbsl.base.machine import lazy_import
from dbsl.config.fields import Role
from dbsl.config.hooks import Extra, Row
from dbsl.config.settings import RunConfig
from dbsl.model import load_model

timm = lazy_import("timm")


@dataclass(frozen=True)
class HubSettings(RunConfig):
    """Whether a finished run's model goes to the hub."""

    # --- run
    # repository user/name on the hub for a timm model, once the run is finished
    push_to_hub: Annotated[str | None, Role.FREE | Role.COMMAND] = None


class Hub(Extra):
    """Pushes the model of a run that has come to its end."""

    Settings = HubSettings

    def __init__(self, repository: str) -> None:
        self._repository, self._folder = repository, None

    @classmethod
    def of(cls, config: HubSettings) -> Hub | None:
        return cls(config.push_to_hub) if config.push_to_hub else None

    def report(self, folder: Path, rows: Sequence[Row]) -> None:
        self._folder = folder

    def close(self, kind: type[BaseException] | None) -> None:
        """Push; where that fails, as without a login, a line says how to do it later."""
        if kind is not None or self._folder is None:
            return
        call = f'timm.models.push_to_hf_hub(load_model("{self._folder}"), "{self._repository}")'
        try:
            model = load_model(self._folder)
            done = timm.models.push_to_hf_hub(model, self._repository, safe_serialization=True)
        except Exception as reason:  # network, hub, name or model: many types
            later = f"from dbsl.model import load_model; import timm; {call}"
            print(f"warning: push_to_hub failed ({in_line(reason)}); later: {later}", flush=True)
            return
        print(f"pushed: {done.commit_url}", flush=True)
