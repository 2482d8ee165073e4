"""Pages say what the CSV files say; their links lead somewhere."""

import re

import pytest

from plots import tables
from plots.accuracy_tables import BEYOND
from plots.rows import RESULTS, ROOT, read
from plots.tables import MARKED, TABLES, main, pages, with_tables

PAGES = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in pages()}
DOCS = [name for name in PAGES if name.startswith("docs/")]


def test_every_table_is_that_of_its_csv_files_and_stands_on_a_page(capsys):
    main(["--check"])
    assert capsys.readouterr().out == ""
    assert {found[2] for text in PAGES.values() for found in MARKED.finditer(text)} == set(TABLES)


def test_a_figure_changed_by_hand_fails_the_check_and_is_written_back(
    tmp_path, monkeypatch, capsys
):
    (page := tmp_path / "README.md").write_text(PAGES["README.md"].replace("36.9 ±", "63.9 ±"))
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match=r"error: run python -m plots\.tables"):
        main(["--check"])
    assert capsys.readouterr().out == "README.md: table summary differs from its CSV file\n"
    assert "63.9 ±" in page.read_text()
    main([])
    assert page.read_text() == PAGES["README.md"]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("<!-- table: none_such -->\n<!-- end -->\n", "table must be one of .*, got none_such"),
        ("<!-- table: mini -->\n", "each table must end in a line <!-- end -->"),
    ],
)
def test_a_table_without_name_or_end_is_refused(text, error):
    with pytest.raises(ValueError, match=error):
        with_tables(text, "")


def test_the_table_of_what_goes_beyond_has_every_arm_of_both_workloads():
    for name in ("beyond", "beyond_imagenette"):
        arms = {row["arm"] for row in read(RESULTS / name / "arms.csv")}
        assert arms - {"hybrid", "ema"} == set(BEYOND)  # reference, raw weights of the ema run


@pytest.mark.parametrize("name", PAGES)
def test_links_of_a_page_lead_to_files_and_headings(name):
    for link in re.findall(r"\]\(([^)\s]+)\)", PAGES[name]):
        if re.match("https?:", link):
            continue
        path, _, heading = link.partition("#")
        target = (ROOT / name).parent / path if path else ROOT / name
        assert target.exists(), link
        headings = re.findall(r"^#+ (.*)$", target.read_text(), re.M) if heading else []
        slugs = [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings]  # GitHub's
        assert not heading or heading in slugs, link


def test_readme_is_short_and_leads_to_every_page():
    text = PAGES["README.md"]
    prose = [line for line in text.splitlines() if not line.startswith(("|", "<!--"))]
    assert len(prose) <= 180
    assert len(text.split()) <= 2200
    assert not [name for name in DOCS if f"]({name})" not in text]


@pytest.mark.parametrize("name", DOCS)
def test_a_page_opens_with_the_question_that_it_answers(name):
    title, empty, question = PAGES[name].splitlines()[:3]
    assert title.startswith("# ")
    assert empty == ""
    assert re.match(r"\*\*.*\?\*\*", question)
