"""Every worker with its own batch size: a training script, and the parts of it for other loops."""

from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from dbsl.base.errors import SettingError as SettingError
    from dbsl.library.check import check as check
    from dbsl.library.loader import share as share
    from dbsl.library.loader import steps_of as steps_of
    from dbsl.library.loader import uneven as uneven
    from dbsl.library.processes import mean_scale as mean_scale
    from dbsl.library.rounds import Rounds as Rounds
    from dbsl.library.uneven import UnevenBatchSampler as UnevenBatchSampler
    from dbsl.plan.deals import BatchSplit as BatchSplit
    from dbsl.plan.deals import split_batch as split_batch
    from dbsl.plan.solve import PlanRules as PlanRules
    from dbsl.plan.solve import plan_dual_batch as plan_dual_batch
    from dbsl.plan.types import Plan as Plan
    from dbsl.plan.types import TimeModel as TimeModel
    from dbsl.profile.fit import StepTimes as StepTimes
    from dbsl.profile.fit import measure_step as measure_step

_HOMES = {  # imported when they are first used: ``import dbsl`` alone costs nothing
    "UnevenBatchSampler": "library.uneven",
    "uneven": "library.loader",
    "check": "library.check",
    "share": "library.loader",
    "steps_of": "library.loader",
    "mean_scale": "library.processes",
    "Rounds": "library.rounds",
    "measure_step": "profile.fit",
    "StepTimes": "profile.fit",
    "split_batch": "plan.deals",
    "BatchSplit": "plan.deals",
    "plan_dual_batch": "plan.solve",
    "PlanRules": "plan.solve",
    "Plan": "plan.types",
    "TimeModel": "plan.types",
    "SettingError": "base.errors",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module 'dbsl' has no attribute {name!r}")
    return getattr(import_module(f"dbsl.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
