"""The plans that a run's log has recorded: which holds when, and how many steps it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from dbsl.log.rows import plan_row
from dbsl.plan.stages import Stage, stage_at
from dbsl.plan.types import Plan, plan_from_plain


class Planned:
    """Stages and the plan in force at each resolution.

    Attributes:
        stages: All stages of the run.
        first: The plan that each resolution starts with.

    Args:
        stages: All stages of the run.
        plans: The plan of each resolution.
        counted: Workers whose steps count; for joint steps one.
    """

    def __init__(
        self, stages: Sequence[Stage], plans: Mapping[int, Plan], counted: Sequence[int]
    ) -> None:
        self.stages = stages
        self.first, self._plans = dict(plans), dict(plans)
        self._from = dict.fromkeys(plans, 0)  # epochs from which they are in force
        self._counted = counted
        self._last = dict.fromkeys(plans, (0, 0))  # epochs and rounds of the last change

    @property
    def epochs(self) -> int:
        """Epochs of the run."""
        return self.stages[-1].end_epoch

    @property
    def steps(self) -> int:
        """Steps of the run."""
        return sum(self._steps_of(self._plans[s.resolution]) * len(s.epochs) for s in self.stages)

    @property
    def latest(self) -> dict[int, tuple[int, Plan]]:
        """Since which epoch the plan in force holds, and that plan, where it is not the first."""
        return {
            resolution: (self._from[resolution], plan)
            for resolution, plan in self._plans.items()
            if plan.workers != self.first[resolution].workers
        }

    def at(self, epoch: int) -> Plan:
        """Return the plan of an epoch."""
        return self._plans[stage_at(self.stages, epoch).resolution]

    def change(self, epoch: int, round_: int, plan: Plan) -> tuple[Plan, int] | None:
        """Take the plan of a round; return the one before, and the steps that the run gains.

        None: nothing has changed.
        """
        resolution = stage_at(self.stages, epoch).resolution
        before = self._plans[resolution]
        # Without a barrier, a slow worker may still be in a round with an earlier plan.
        if plan is before or (epoch, round_) < self._last[resolution]:
            return None
        self._plans[resolution], self._from[resolution] = plan, epoch
        self._last[resolution] = (epoch, round_)
        if plan.workers == before.workers:
            return None
        own = [stage for stage in self.stages if stage.resolution == resolution]
        left = sum(max(0, s.end_epoch - max(s.first_epoch, epoch)) for s in own)
        return before, left * (self._steps_of(plan) - self._steps_of(before))

    def new_rows(
        self, state: Mapping[str, Any] | None, begin: int, *, anew: bool
    ) -> list[dict[str, Any]]:
        """Return a row for each stage; of a resumed run for those not over that are new.

        All are where plans were made anew. `begin` is the epoch that the run goes on with.
        """
        rows = [plan_row(stage, self._plans[stage.resolution]) for stage in self.stages]
        if state is None:
            return rows
        return [
            row | {"from_epoch": begin}
            for stage, row in zip(self.stages, rows, strict=True)
            if stage.end_epoch > begin and (anew or asdict(stage) not in state["stages"])
        ]

    def steps_done(self, state: Mapping[str, Any]) -> int:
        """Return how many of all steps of the run, as it is now, earlier sessions took."""
        share, before = state["share_done"], state["stages"][-1]["end_epoch"]
        if before == self.epochs:
            return round(share * self.steps)
        epochs = share * before  # done
        return round(
            sum(
                self._steps_of(self._plans[stage.resolution])
                * min(max(epochs - stage.first_epoch, 0), len(stage.epochs))
                for stage in self.stages
            )
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` goes on from."""
        return {
            "planned_epoch": dict(self._from),
            "plans": {resolution: asdict(plan) for resolution, plan in self._plans.items()},
            "stages": [asdict(stage) for stage in self.stages],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the plans that `state_dict` returned."""
        self._from |= state["planned_epoch"]
        self._last |= {resolution: (epoch, 0) for resolution, epoch in self._from.items()}
        self._plans |= {r: plan_from_plain(values) for r, values in state["plans"].items()}

    def _steps_of(self, plan: Plan) -> int:
        return sum(plan.workers[worker].steps for worker in self._counted)


def epochs_done(state: Mapping[str, Any] | None) -> int:
    """Return the complete epochs of a log's state; None: of a run that begins."""
    return state["epoch"] + 1 if state and state["train_time_s"] else 0
