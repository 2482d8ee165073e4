"""A run is asked to stop, or has to: by signals, minutes, or weights that are not finite."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

from experiments.benchmarks.faults.run import FLAGS, JOINT, FaultyRun, Row, metrics
from experiments.benchmarks.kills import fingerprint


def asked_to_stop(scratch: Path) -> Iterator[Row]:
    """Signals, and the limit on minutes."""
    for mode, world_size, flags in (
        ("bsp, simulated", 1, FLAGS),
        ("asp, simulated", 1, [*FLAGS, "--sync", "asp"]),
        ("bsp, 3 processes", 3, FLAGS),
        ("step, 3 processes", 3, JOINT),
        ("asp, 3 processes", 3, [*FLAGS, "--sync", "asp"]),
    ):
        if world_size == 1:
            flags = [*flags, "--workers", "3"]
        whole = FaultyRun(scratch / f"unstopped-{mode}", flags, world_size)
        assert set(whole.wait()) == {0}, whole.said("error")
        for name in ("SIGTERM", "SIGINT"):
            folder = scratch / f"stopped-{mode}-{name}"
            run = FaultyRun(folder, flags, world_size)
            run.wait_for_epoch(2)
            time.sleep(0.15)  # into the next epoch
            began = time.monotonic()
            for process in run.processes:
                process.send_signal(getattr(signal, name))
            statuses, said = run.wait(), run.said("^stopped")
            seconds = round(time.monotonic() - began, 1)
            resumed = FaultyRun(folder, [*flags, "--resume", "auto"], world_size).wait()
            same = fingerprint(folder) == fingerprint(whole.folder)
            exact = "asp, 3" not in mode
            yield Row(
                name,
                mode,
                f"finishes the step, saves, status 75; resumed {'the same bits' if exact else ''}",
                f"status {statuses}, {said!r}, resumed {resumed}"
                + (f", same bits: {same}" if exact else ""),
                set(statuses) == {75} and set(resumed) == {0} and (same or not exact),
                seconds,
            )
    folder = scratch / "minutes"
    run = FaultyRun(folder, [*FLAGS, "--max-minutes", "0.15"], 1, epochs=60)
    statuses = run.wait()
    yield Row(
        "--max-minutes 0.15",
        "bsp, simulated",
        "saves and ends with status 75 in time",
        f"status {statuses}, {run.said('^stopped')!r}",
        statuses == [75],
        "0",
    )


def not_finite(scratch: Path) -> Iterator[Row]:
    """A learning rate that blows the weights up."""
    for mode, world_size, flags in (
        ("bsp, simulated", 1, FLAGS),
        ("bsp, 2 processes", 2, FLAGS),
        ("asp, 2 processes", 2, [*FLAGS, "--sync", "asp"]),
        ("step, 2 processes", 2, [*JOINT, "--local-batch-sizes", "7,13"]),
    ):
        folder = scratch / f"nan-{mode}"
        wild = ["--lr", "1e25", "--warmup-epochs", "0", "--max-bad-rounds", "3"]
        run = FaultyRun(folder, [*flags, *wild], world_size, epochs=12)
        statuses = run.wait()
        refused = [r for r in metrics(folder) if r["event"] == "round" and r.get("refused")]
        said = any(run.said("error: max_bad_rounds", rank) for rank in range(world_size))
        yield Row(
            "weights are not finite (--lr 1e25)",
            mode,
            "rounds are refused and counted; above --max-bad-rounds 3 the run stops and says so",
            f"status {statuses}, {len(refused)} refused rounds logged, named: {said}",
            0 not in statuses and "hangs" not in statuses and len(refused) >= 3 and said,
            "at the round's end",
        )
