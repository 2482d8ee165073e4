from pathlib import Path

import pytest

from dbsl.config import hooks
from dbsl.config.parse import parse_config
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
