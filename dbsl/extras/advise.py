"""``--advise``: which way of training is fastest on these machines; dbsl/tools/advise does it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from accelerate import Accelerator

from dbsl.base.errors import SettingError
from dbsl.config.fields import Excludes, Needs, Role, refuse
from dbsl.config.hooks import Extra
from dbsl.config.settings import RunConfig
from dbsl.run.training import Run

_NOT = Excludes("plan_only") | Excludes("eval_only") | Excludes("resume") | Excludes("compile")
_NOT |= Excludes("dedicated_server") | Excludes("worker_processes") | Excludes("micro_batch_size")
_NOT |= Excludes("sync_batch_norm")  # a process that measures alone would wait for others


@dataclass(frozen=True)
class AdviseSettings(RunConfig):
    """Whether to advise instead of to train."""

    # --- run
    # measure steps and exchanges of these processes for a minute, predict an epoch of each way of
    # training, advise one, then stop
    advise: Annotated[bool, Role.FREE | Role.COMMAND, _NOT | Excludes(push="gradients")] = False
    # print the advice as JSON, with --advise
    json: Annotated[bool, Role.FREE | Role.COMMAND, Needs("advise")] = False


class Advise(Extra):
    """Measures and advises instead of training."""

    Settings = AdviseSettings

    @classmethod
    def of(cls, config: AdviseSettings) -> Advise | None:
        return cls() if config.advise else None

    def check(self, config: AdviseSettings, accelerator: Accelerator) -> None:
        count = accelerator.num_processes
        text = "advise must be given to at least 2 processes, whose exchanges are measured"
        refuse([(count < 2, text, count)])

    def instead(
        self,
        config: AdviseSettings,
        prepare: Callable[[AdviseSettings], Run],
        accelerator: Accelerator,
    ) -> bool:
        try:
            tool = importlib.import_module("dbsl.tools.advise.advise")
        except ModuleNotFoundError as error:
            if not str(error.name).startswith("dbsl.tools"):
                raise
            raise SettingError("advise needs the folder dbsl/tools, got none") from None
        tool.advise_run(config, prepare, accelerator)
        return True
