"""Tables of what is measured again are those of their rows."""

import pytest

from experiments.plots import tables


@pytest.fixture
def copies(tmp_path, monkeypatch):
    """Copies of the pages."""
    for page, _ in tables.TABLES.values():
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / page).write_text((tables.ROOT / page).read_text("utf-8"), "utf-8")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    return tmp_path


def test_every_table_is_that_of_its_rows_and_a_change_by_hand_is_written_back(copies, capsys):
    tables.main(["--check"])
    assert capsys.readouterr().out == ""
    page = copies / "docs/speed.md"
    right = page.read_text()
    page.write_text(wrong := right.replace("| bare step | 97.0", "| bare step | 98.0"))
    assert wrong != right
    with pytest.raises(SystemExit, match=r"error: run python -m experiments.plots\.tables"):
        tables.main(["--check"])
    assert capsys.readouterr().out == "docs/speed.md: table speed differs from its rows\n"
    assert page.read_text() == wrong
    tables.main([])
    assert page.read_text() == right


@pytest.mark.parametrize("missing", ["<!-- table: speed -->", "<!-- end -->"])
def test_a_page_without_its_table_is_refused(copies, missing):
    page = copies / "docs/speed.md"
    page.write_text(page.read_text().replace(missing, ""))
    with pytest.raises(SystemExit, match=r"docs/speed\.md must have a table speed"):
        tables.main([])
