"""What a run says before it begins."""

import pytest

from tests.helpers import run


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {},
            "trains at 8, then 16 px in every learning-rate stage, which saves time (unset "
            "--resolutions, --schedule cyclic); --resolutions 16 trains at 16 px alone",
        ),
        ({"schedule": "progressive"}, "trains at 8, then 16 px once, which saves time"),
        ({"schedule": "fixed"}, None),
        ({"resolutions": (8, 16)}, None),
    ],
)
def test_resolutions_that_nobody_has_asked_for_are_told(tmp_path, capsys, settings, line):
    run(tmp_path / "run", **{"resolutions": None, "epochs": 4, "plan_only": True, **settings})
    said = capsys.readouterr().out
    assert line in said if line else "which saves time" not in said


def test_a_resolution_without_an_epoch_is_measured_for_a_later_resume_and_that_is_said(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("dbsl.run.prepare.know_workers", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(tmp_path / "run", resolutions=(8, 16), epochs=1, slope=None, intercept=None)
    told = "no epoch is at 8 px: every learning-rate stage is shorter than 2 epochs; measured all"
    assert f"warning: {told} the same, for a resume with more epochs" in capsys.readouterr().out
