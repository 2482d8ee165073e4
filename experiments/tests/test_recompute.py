"""The pages' figures are those of the rows; one that is not is named."""

import pytest

from experiments import recompute

RESULTS = "docs/results.md"
NO_RESULT = "- **Mixing showed no benefit.**"
# Page, text, what it is changed to, what is told of it.
CHANGES = [
    (RESULTS, "small) ended 2.0", "small) ended 2.1", "'2.1 ± 0.8': the rows give 2.0150, 0.8034"),
    ("README.md", "| 0.63 ± 0.02 |", "| 0.64 ± 0.02 |", "'0.64 ± 0.02': the rows give"),
    (RESULTS, "ended 1.6 ± 0.7 points", "ended 1.5 ± 0.7 points", "'1.5 ± 0.7': the rows give"),
    (RESULTS, NO_RESULT, f"It took 3.14 times.\n{NO_RESULT}", "'3.14': no claim covers it"),
    ("README.md", "3.0 ± 0.6 points above", "some above", "the page must have it, once"),
]


@pytest.fixture
def copies(tmp_path):
    """Copies of the pages, without the changes."""
    for page in recompute.CLAIMS:
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / page).write_text((recompute.ROOT / page).read_text("utf-8"), "utf-8")
    return tmp_path


def told(folder, capsys) -> tuple[int, list[str]]:
    with pytest.raises(SystemExit) as end:
        recompute.main([str(folder)])
    return end.value.code, capsys.readouterr().out.splitlines()


def test_figures_that_no_longer_hold_are_all_named_and_end_with_status_1(copies, capsys):
    for page, old, new, _ in CHANGES:
        text = (copies / page).read_text("utf-8")
        assert text.count(old) == 1
        (copies / page).write_text(text.replace(old, new), "utf-8")
    status, lines = told(copies, capsys)
    assert (status, len(lines)) == (1, len(CHANGES) + len(recompute.CLAIMS)), lines
    counts = [int(line.split()[1]) for line in lines if line.endswith(" compared")]
    assert counts[0] > 35
    assert sum(counts[1:]) > 900
    for page, _, new, message in CHANGES:
        (line,) = (line for line in lines if message in line)
        before = (copies / page).read_text("utf-8").partition(new)[0]
        place = 1 if "once" in message else before.count("\n") + 1
        assert line.startswith(f"{page}:{place}: ")
