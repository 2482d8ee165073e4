import re
from pathlib import Path

import pytest

from dbsl.config import hooks
from dbsl.config.parse import parse_config
from tests.helpers import ROOT, rows, run
from train import Config


def test_the_table_of_extras_has_all_their_settings_by_file():
    found = {
        name: tuple(vars(extra.Settings)["__annotations__"])
        for name, extra in hooks.found_extras().items()
        if extra.Settings is not None
    }
    assert {Path(file).stem: names for file, names in hooks._SETTINGS.items()} == found


def test_a_flag_whose_extra_is_not_there_is_refused_with_its_file(monkeypatch, tmp_path):
    monkeypatch.setitem(hooks._SETTINGS, "gone.py", ("gone_by",))
    message = "--help lists, got --gone-by, which needs dbsl/extras/gone.py"
    with pytest.raises(ValueError, match=message):
        parse_config(Config, ["--gone-by", "3"])
    file = tmp_path / "settings.yaml"
    file.write_text("gone_by: 3\n")
    with pytest.raises(ValueError, match=r"got gone_by in .* which needs dbsl/extras/gone.py"):
        parse_config(Config, ["--config", str(file)])


def test_the_metric_and_the_tracker_of_contributing_are_extras_that_work(tmp_path, monkeypatch):
    text = (ROOT / ".github/CONTRIBUTING.md").read_text()
    blocks = [
        block for block in re.findall(r"```python\n(.*?)```", text, re.S) if "Extra)" in block
    ]
    assert len(blocks) == 2
    own = {}
    for number, block in enumerate(blocks):
        assert len([line for line in block.splitlines() if line.strip()]) <= 10
        names = {}
        exec(block, names)
        (own[f"own{number}"],) = (
            value
            for value in names.values()
            if isinstance(value, type) and issubclass(value, hooks.Extra) and value != hooks.Extra
        )
    found = hooks.found_extras()
    monkeypatch.setattr(hooks, "found_extras", lambda: found | own)
    run(tmp_path / "run", epochs=3, eval_every=2, workers=1, local_batch_sizes=(8,))
    evaluated = rows(tmp_path / "run", "eval")
    assert all(row["weight_norm"] > 0 for row in evaluated)
    lines = (tmp_path / "run/accuracy.csv").read_text().splitlines()
    assert lines == [f"{row['epoch'] + 1},{row['accuracy']}" for row in evaluated]
    assert [row["epoch"] for row in evaluated] == [1, 2]
