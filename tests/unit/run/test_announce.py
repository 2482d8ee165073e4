"""What a run says before it begins."""

import pytest

from tests.helpers import run


def test_a_resolution_without_an_epoch_is_measured_for_a_later_resume_and_that_is_said(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("dbsl.run.prepare.know_workers", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(tmp_path / "run", resolutions=(8, 16), epochs=1, slope=None, intercept=None)
    told = "no epoch is at 8 px: every learning-rate stage is shorter than 2 epochs; measured all"
    assert f"warning: {told} the same, for a resume with more epochs" in capsys.readouterr().out
