"""A run to be played: planned as any other, without data and with a model of one number."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

from torch import nn

from dbsl.optimizer import build_optimizer
from dbsl.plan.islands import Islands
from dbsl.plan.machines import KnownWorkers
from dbsl.plan.sampler import Order
from dbsl.plan.stages import make_stages
from dbsl.plan.types import TimeModel
from dbsl.run.prepare import plan_run
from dbsl.run.training import Run
from experiments.benchmarks.coverage.cases import Case


@dataclass(frozen=True)
class _Samples:
    """Training data of which only the order counts."""

    count: int
    blocks: Order | None

    def __len__(self) -> int:
        return self.count


def prepare(case: Case) -> Run:
    """Return what `dbsl.run.prepare.prepare` does, without data and with a model of one number.

    Raises:
        ValueError: If there is no such plan.
    """
    from train import Config

    config = Config(
        **case.options, optimizer="momentum", momentum=0.0, weight_decay=0.0, noise_scale=False
    )
    resolutions = config.resolutions
    islands = Islands.of(config)
    models = {
        r: TimeModel.of(
            [TimeModel(m.slope * r / 8, m.intercept) for m in case.models], len(case.models)
        )
        for r in resolutions
    }
    # Where all are equal, a batch and a share of a round for each is known to fit.
    known = KnownWorkers(
        models={r: islands.join(one) for r, one in models.items()},
        processes=models if islands.several else None,
        large_batch_sizes=dict.fromkeys(resolutions, case.large),
        measured=True,
    )
    stages = make_stages(config.epochs, resolutions, learning_rate=1.0)
    given = (config, known, stages, case.samples, case.least)
    config, plans, planner, sampler = plan_run(*given, blocks=case.blocks, say=lambda line: None)
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    return Run(
        config=config,
        data=SimpleNamespace(train=_Samples(case.samples, case.blocks)),
        stages=tuple(stages),
        model=model,
        plans=plans,
        planner=planner,
        known=known,
        sampler=sampler,
        islands=islands,
        machine=case.emulation,
        mixing=None,
        loss_of=None,
        build_optimizer=lambda module: build_optimizer("momentum", module, 1.0, 0.0, 0.0),
    )
