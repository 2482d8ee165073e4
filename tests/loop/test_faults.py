"""What goes wrong in a run ends in one line, and costs nothing that was good."""

import errno

import numpy as np
import pytest
from safetensors.torch import load_file

from dbsl.base.errors import (
    EXIT_DIVERGED,
    BadRoundsError,
    one_line_errors,
)
from dbsl.checkpoint import checkpoint, disk
from tests.helpers import each_step, refused, rows, short, summary_of
from tests.loop.test_resume import MODES, ONE_SIDE, ROUNDS, run

SHORT = {**ONE_SIDE, "epochs": 2, "lr_milestones": ()}


@pytest.mark.parametrize("mode", short(["bsp", "asp", "step", "gradients"], "bsp", "step"))
def test_rounds_that_are_not_finite_are_refused_and_too_many_stop_the_run(tmp_path, mode):
    bad = {"lr": 1e15, "warmup_epochs": 0, "epochs": 9, "lr_milestones": (8,), "max_bad_rounds": 3}
    message = r"max_bad_rounds must be at least the \d+ rounds .*got 3"
    with pytest.raises(BadRoundsError, match=message) as raised:
        run(tmp_path / "run", **{**MODES[mode], **ONE_SIDE, **bad})
    with pytest.raises(SystemExit) as ended, one_line_errors():
        raise raised.value
    assert ended.value.code == EXIT_DIVERGED
    if mode != "gradients":  # whose rounds are recorded by epoch
        assert sum(row.get("refused", False) for row in rows(tmp_path / "run", "round")) > 3
    for found in disk.checkpoints_in(tmp_path / "run"):
        state = load_file(found.folder / "model.safetensors")
        assert all(value.isfinite().all() for value in state.values() if value.is_floating_point())


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("bsp", "round 1 of epoch 1 of worker 0 is refused: conv1.0.weight is not finite, though"),
        ("step", "round 1 of epoch 1 of all workers is refused: conv1.0.weight is not finite"),
        ("gradients", "of worker 0 is refused: the gradient of conv1.0.weight is not finite"),
    ],
)
def test_one_bad_round_among_good_ones_is_told_at_once_and_does_not_stop_the_run(
    tmp_path, capsys, mode, said
):
    first = iter([float("nan")])

    def poison(saver, round_over):
        if round_over:
            saver._cluster.outgoing[0] = next(first, saver._cluster.outgoing[0])

    with each_step(poison):
        run(tmp_path / "run", **{**MODES[mode], **SHORT})
    summary = summary_of(tmp_path / "run")
    assert summary["refused_rounds"] == 1
    assert np.isfinite(summary["final_loss"])
    lines = capsys.readouterr().out.splitlines()
    told = [n for n, line in enumerate(lines) if " is refused: " in line]
    assert len(told) == 1
    assert said in lines[told[0]]
    assert not any(line.startswith("epoch 1/") for line in lines[: told[0]])


def test_a_checkpoint_that_cannot_be_written_ends_the_run_and_leaves_the_good_ones(
    tmp_path, monkeypatch, capsys
):
    write, count = checkpoint.write_shard, iter(range(9))

    def full(folder, *rest):
        if next(count) == 1:
            folder.mkdir(exist_ok=True)
            (folder / "rank-00000.json").write_text("half a fi")
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(folder, *rest)

    monkeypatch.setattr(checkpoint, "write_shard", full)
    said = refused(capsys, lambda: run(tmp_path / "run", **ROUNDS, **SHORT))
    good = tmp_path / "run/checkpoints/epoch-0001"
    assert f"(No space left on device); the last good checkpoint is {good}" in said
    assert [p.name for p in (tmp_path / "run/checkpoints").iterdir()] == ["epoch-0001"]


def test_a_checkpoint_that_cannot_be_removed_is_told_of_and_costs_nothing(
    tmp_path, monkeypatch, capsys
):
    remove = disk.remove

    def refusing(folder):
        if folder.name == "epoch-0001":
            raise PermissionError(errno.EACCES, "Permission denied", str(folder))
        remove(folder)

    monkeypatch.setattr(disk, "remove", refusing)
    run(tmp_path / "run", **ROUNDS, **SHORT, keep_checkpoints=1)
    folder = tmp_path / "run/checkpoints"
    assert sorted(p.name for p in folder.iterdir()) == ["epoch-0001", "epoch-0002"]
    said = capsys.readouterr()
    line = f"{folder / 'epoch-0001'} could not be removed (Permission denied)"
    assert line in said.out + said.err
