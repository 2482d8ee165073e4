"""Each tool is run by its own module, by `python -m dbsl TOOL` and by the command `dbsl`."""

import sys
from importlib.util import find_spec

import pytest

from dbsl import __main__ as command


@pytest.mark.parametrize("tool", command.TOOLS)
def test_a_tool_runs_by_its_name(tool, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["dbsl", tool, "--help"])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert not ended.value.code
    assert f"usage: python -m dbsl.{tool}" in capsys.readouterr().out
    assert find_spec(f"dbsl.{tool}") is not None


@pytest.mark.parametrize(("given", "got"), [(["train"], "train"), ([], "none")])
def test_another_name_is_one_line(given, got, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["dbsl", *given])
    with pytest.raises(SystemExit) as ended:
        command.main()
    line = f"error: tool must be one of plan, predict, profile, report, study, got {got}\n"
    assert (ended.value.code, capsys.readouterr().err) == (2, line)
