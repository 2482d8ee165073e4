"""train.py with deterministic kernels, which may be stopped in the middle of a round.

    python -m experiments.benchmarks.gpu.repeatable [--stop-in-round N] FLAGS

Set CUBLAS_WORKSPACE_CONFIG=:4096:8 on a GPU.
"""

from __future__ import annotations

import argparse
import os
import signal
from typing import Any

import torch

import train
from dbsl.base.errors import one_line_errors
from dbsl.config.parse import parse_config


def main() -> None:
    """Run train.py, asked to stop as by SIGTERM while its N-th round begins."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--stop-in-round", type=int)
    arguments, flags = parser.parse_known_args()
    torch.use_deterministic_algorithms(True)
    start = train.start_accelerator

    def without_trials(*given: Any) -> Any:
        accelerator = start(*given)
        torch.backends.cudnn.benchmark = False  # which algorithm is fastest is chance
        return accelerator

    train.start_accelerator = without_trials
    if arguments.stop_in_round:
        train_turn, rounds = train.train_turn, [0]

        def stopped(*given: Any) -> None:
            rounds[0] += 1
            if rounds[0] == arguments.stop_in_round:
                os.kill(os.getpid(), signal.SIGTERM)  # train.py stops after its next step
            train_turn(*given)

        train.train_turn = stopped
    with one_line_errors():
        train.main(parse_config(train.Config, flags))


if __name__ == "__main__":
    main()
