"""A run to be played: planned as any other, without data and with a model of one number."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch import nn

from dbsl.optimizer import create_optimizer
from dbsl.plan.islands import Islands
from dbsl.plan.machines import WorkerProfiles
from dbsl.plan.stages import Stages
from dbsl.plan.types import TimeModel
from dbsl.run.connect import connect
from dbsl.run.plans import Plans
from dbsl.run.times import Times
from experiments.benchmarks.coverage.cases import Case
from experiments.benchmarks.coverage.losing import LosingCluster

_ALONE = {"process_index": 0, "local_process_index": 0, "num_processes": 1}
_ACCELERATOR = SimpleNamespace(
    device=torch.device("cpu"),
    prepare_optimizer=lambda optimizer: optimizer,
    gather=lambda tensor: tensor,
    print=lambda line: None,
    **_ALONE,
)


def prepare(case: Case) -> SimpleNamespace:
    """Return what `dbsl.run.workers.Workers` has, as far as a cluster asks for it.

    Raises:
        ValueError: If there is no such plan.
    """
    from train import Config

    config = Config(
        **case.options,
        lr=1.0,
        optimizer="momentum",
        momentum=0.0,
        weight_decay=0.0,
        noise_scale=False,
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
    known = WorkerProfiles(
        models={r: islands.join(one) for r, one in models.items()},
        processes=models if islands.several else None,
        large_batch_sizes=dict.fromkeys(resolutions, case.large),
        measured=True,
    )
    stages = Stages(config, resolutions)
    times = Times(stages.config, known, case.samples, case.least, case.blocks)
    plans = Plans(times, stages, _ACCELERATOR)
    plans.machine = case.emulation
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    workers = SimpleNamespace(
        plans=plans,
        config=plans.config,
        accelerator=_ACCELERATOR,
        raw_model=model,
        data=SimpleNamespace(train=range(case.samples)),
    )
    with patch("dbsl.run.connect.SimulatedCluster", LosingCluster):
        workers.cluster, workers.stepper = connect(
            workers, lambda module: create_optimizer("momentum", module, 1.0, 0.0, 0.0)
        )
    workers.optimizers = workers.stepper.optimizers
    return workers
