"""Pages are short, their links lead somewhere, and README.md leads to each of them."""

import re

import pytest

from tests.helpers import ROOT, pages

PAGES = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in pages()}
PAGES["CHANGELOG.md"] = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
DOCS = [name for name in PAGES if name.startswith("docs/")]


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


def test_readme_docs_and_changelog_are_short_and_readme_leads_to_every_page():
    words = {name: len(text.split()) for name, text in PAGES.items()}
    assert words["README.md"] <= 900
    assert words["CHANGELOG.md"] <= 900
    assert sum(words[name] for name in ("README.md", *DOCS)) <= 10000
    assert not [name for name in DOCS if f"]({name}" not in PAGES["README.md"]]


@pytest.mark.parametrize("name", DOCS)
def test_a_page_opens_with_the_question_that_it_answers(name):
    title, empty, question = PAGES[name].splitlines()[:3]
    assert title.startswith("# ")
    assert empty == ""
    assert re.match(r"\*\*.*\?\*\*", question)
