"""Pages say what the CSV files say; their links lead somewhere."""

import re

import pytest
from scipy.stats import ttest_1samp

from experiments.plots import gap_tables, tables
from experiments.plots.accuracy_tables import BEYOND
from experiments.plots.rows import RESULTS, ROOT, read
from experiments.plots.tables import MARKED, TABLES, main, pages, with_tables

PAGES = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in pages()}
DOCS = [name for name in PAGES if name.startswith("docs/")]


def test_every_table_is_that_of_its_csv_files_and_stands_on_a_page(capsys):
    main(["--check"])
    assert capsys.readouterr().out == ""
    assert {found[2] for text in PAGES.values() for found in MARKED.finditer(text)} == set(TABLES)


def test_a_figure_changed_by_hand_fails_the_check_and_is_written_back(
    tmp_path, monkeypatch, capsys
):
    wrong = re.sub(r"(gap/dual_3\.yaml\) \| )\+2", r"\g<1>+3", PAGES["README.md"])
    (page := tmp_path / "README.md").write_text(wrong)
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match=r"error: run python -m experiments.plots\.tables"):
        main(["--check"])
    assert capsys.readouterr().out == "README.md: table summary differs from its CSV file\n"
    assert wrong != PAGES["README.md"]
    assert page.read_text() == wrong
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


def test_readme_and_docs_are_short_and_readme_leads_to_every_page():
    words = {name: len(text.split()) for name, text in PAGES.items()}
    assert words["README.md"] <= 1600
    assert sum(words[name] for name in ("README.md", *DOCS)) <= 16000
    assert not [name for name in DOCS if f"]({name}" not in PAGES["README.md"]]


@pytest.mark.parametrize("name", DOCS)
def test_a_page_opens_with_the_question_that_it_answers(name):
    title, empty, question = PAGES[name].splitlines()[:3]
    assert title.startswith("# ")
    assert empty == ""
    assert re.match(r"\*\*.*\?\*\*", question)


def test_hypotheses_are_tested_by_seed_and_corrected_together():
    seeds = range(5)
    accuracy = {
        "dual_3": {seed: 45.0 + seed for seed in seeds},
        "all_large": {seed: 43.0 + seed + 0.1 * (seed % 2) for seed in seeds},
        "dual_4": {0: 45.0, 1: 45.9, 7: 99.0},  # of seed 7 there is no pair
        "ddp_128_1gbps": {seed: 44.0 + 2 * seed for seed in seeds},
        "hybrid": {seed: 44.5 + seed + 0.2 * (seed % 3) for seed in seeds},
        "ddp_128": {0: 48.0},  # one seed tells nothing
    }
    found = {each.name: (i, p) for each, i, p in gap_tables.tested(accuracy, gap_tables.HYPOTHESES)}
    assert list(found) == ["H1", "H2", "H3, 1 Gb/s", "H4"]
    assert found["H1"][0].mean == pytest.approx(1.96)
    assert found["H2"][0].count == 2
    hybrid = [accuracy["hybrid"][s] - accuracy["dual_3"][s] for s in seeds]
    raw = [
        ttest_1samp([1.9, 2.0, 1.9, 2.0, 2.0], 0).pvalue,
        ttest_1samp([0.0, 0.1], 0).pvalue,
        ttest_1samp(hybrid, -1.0).pvalue,  # not worse by a point: against that point
    ]
    corrected = [found[name][1] for name in ("H1", "H2", "H4")]
    assert corrected == pytest.approx([4 * raw[0], 2 * raw[1], 3 * raw[2]])  # H3 counts, too
    alone = ttest_1samp([1.0 - s for s in seeds], 0).pvalue
    assert found["H3, 1 Gb/s"][1] == pytest.approx(alone)
