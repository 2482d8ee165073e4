"""Files are damaged, cannot be written, or are no images."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

from experiments.benchmarks.faults.run import FLAGS, FaultyRun, Row, summary
from experiments.benchmarks.kills import fingerprint


def damaged_checkpoint(scratch: Path) -> Iterator[Row]:
    """A bit of the newest checkpoint flips; its manifest is cut."""
    whole = FaultyRun(scratch / "undamaged", [*FLAGS, "--workers", "3"], 1)
    assert whole.wait() == [0]
    for what in ("a bit of its weights flips", "its manifest is cut in half"):
        folder = scratch / f"damaged-{len(what)}"
        run = FaultyRun(folder, [*FLAGS, "--workers", "3"], 1)
        run.wait_for_epoch(3)
        run.wait(timeout_s=0)
        newest = max(folder.glob("checkpoints/*/manifest.json"), key=lambda p: p.stat().st_mtime)
        if "bit" in what:
            path = newest.parent / "rank-00000.safetensors"
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
        else:
            newest.write_bytes(newest.read_bytes()[: newest.stat().st_size // 2])
        again = FaultyRun(folder, [*FLAGS, "--workers", "3", "--resume", "auto"], 1)
        statuses = again.wait()
        same = fingerprint(folder) == fingerprint(whole.folder)
        yield Row(
            f"the newest checkpoint is damaged: {what}",
            "bsp, simulated",
            "it is passed over with a warning, the one before is taken; the same bits",
            f"status {statuses}, {again.said('passed over')!r}, same bits: {same}",
            statuses == [0] and same and again.said("passed over") is not None,
            "at the start",
        )


def no_room(scratch: Path) -> Iterator[Row]:
    """The disk fills up; the folder is read-only; another run has it."""
    disk = scratch / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(disk)])
    if mounted.returncode == 0:
        try:
            folder = disk / "run"
            run = FaultyRun(folder, [*FLAGS, "--workers", "3"], 1, epochs=20)
            run.wait_for_epoch(2)
            with contextlib.suppress(OSError), (disk / "ballast").open("wb") as ballast:
                while True:
                    ballast.write(b"x" * 4096)
            statuses, said = run.wait(), run.said("error")
            left = sorted(p.parent.name for p in folder.glob("checkpoints/*/manifest.json"))
            (disk / "ballast").unlink()
            parts = list(folder.rglob("*.tmp"))
            resumed = FaultyRun(
                folder, [*FLAGS, "--workers", "3", "--resume", "auto"], 1, 20
            ).wait()
            yield Row(
                "the disk is full",
                "bsp, simulated",
                "a clear error, the last good checkpoint intact",
                f"status {statuses}, {said!r}, left {left}, {len(parts)} half files; "
                f"with room again resumed {resumed}",
                statuses == [2] and bool(left) and not parts and resumed == [0],
                "at the next write",
            )
            subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
            run = FaultyRun(disk / "other", [*FLAGS, "--workers", "3"], 1)
            statuses = run.wait()
            yield Row(
                "the folder is read-only",
                "bsp, simulated",
                "a clear error before anything is trained",
                f"status {statuses}, {run.said('error')!r}",
                statuses == [2] and run.said("error: output_dir") is not None,
                "at the start",
            )
        finally:
            subprocess.run(["umount", "-l", str(disk)])
    folder = scratch / "in-use"
    run = FaultyRun(folder, [*FLAGS, "--workers", "3"], 1, epochs=30)
    run.wait_for_epoch(1)
    other = FaultyRun(folder, [*FLAGS, "--workers", "3", "--resume", "auto"], 1)
    statuses, first = other.wait(), run.processes[0].poll()
    run.wait(timeout_s=0)
    yield Row(
        "another run has the folder",
        "bsp, simulated",
        "a clear error, and the other run goes on",
        f"status {statuses}, {other.said('error')!r}, the other is running: {first is None}",
        statuses == [2] and other.said("in use by process") is not None and first is None,
        "at the start",
    )


def bad_images(scratch: Path) -> Iterator[Row]:
    """Files that are no images among those of a folder."""
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    for side, kind in ((32, "stored"), (80, "read as needed")):
        data = scratch / f"images-{side}"
        for label in ("cat", "dog"):
            for number in range(40):
                path = data / "train" / label / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                pixels = rng.integers(0, 255, (side, side, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(path)
                if number in (5, 17, 30):
                    path.write_bytes(path.read_bytes()[:60])
        for limit, goal in ((8, [0]), (1, [2])):
            folder = scratch / f"bad-{side}-{limit}"
            flags = [*FLAGS, "--dataset", str(data), "--max-bad-images", str(limit)]
            flags += ["--train-samples", "64", "--eval-samples", "16", "--workers", "3"]
            run = FaultyRun(folder, flags, 1, epochs=4)
            statuses = run.wait()
            listed = summary(folder).get("bad_images")
            said = run.said("error: max_bad_images")
            yield Row(
                f"6 of 80 images cannot be decoded ({kind}), --max-bad-images {limit}",
                "bsp, simulated",
                "left out, counted, listed by index" if goal == [0] else "a clear stop",
                f"status {statuses}, " + (f"listed {listed}" if goal == [0] else repr(said)),
                statuses == goal and bool(listed if goal == [0] else said),
                "when read",
            )
