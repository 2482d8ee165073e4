"""A run keeps the script that it trains by, and says if it has changed."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from dbsl.run.folder import LockedFolder, commit_of, read_code, script_of

MAIN = SimpleNamespace(is_main_process=True)


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Return a script that was started, and that has imported a file beside it."""
    path = tmp_path / "mine.py"
    path.write_text("import losses\n")
    (tmp_path / "losses.py").write_text("smooth = 0.1\n")
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__=str(path)))
    imported = SimpleNamespace(__file__=str(tmp_path / "losses.py"))
    monkeypatch.setitem(sys.modules, "losses", imported)
    monkeypatch.setitem(sys.modules, "__mp_main__", sys.modules["__main__"])
    return path


@pytest.mark.usefixtures("script")
def test_code_is_the_script_what_it_imports_and_dbsl_but_nothing_that_is_installed(monkeypatch):
    found = read_code()
    assert script_of(found) == "mine.py"
    assert found["mine.py"] == b"import losses\n"
    assert found["losses.py"] == b"smooth = 0.1\n"
    assert "dbsl/run/folder.py" in found
    assert not {"__mp_main__.py", "pytest/__init__.py"} & {*found}
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace())  # as in a notebook
    found = read_code()
    assert script_of(found) == ""
    assert {"losses.py", "dbsl/__init__.py"} <= {*found}


def test_a_resume_by_another_script_names_it_and_keeps_that_of_before(script, tmp_path, capsys):
    path = tmp_path / "run"
    for number, text in enumerate(("one", "one", "two", "three")):
        script.write_text(text)
        with LockedFolder(path, MAIN, new=number == 0) as folder:
            folder.keep_script(read_code())
        said = capsys.readouterr().out
        assert ("mine.py has changed since the run began" in said) == (number > 1)
    kept = {file.name: file.read_text() for file in path.glob("*.py")}
    assert kept == {"mine.py": "three", "mine-1.py": "one", "mine-2.py": "two"}


def test_a_checkout_has_a_commit_and_says_if_files_have_changed_and_others_have_none(script):
    assert commit_of(script) == ""
    git = ["git", "-C", str(script.parent), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for command in (["init", "-q"], ["add", "mine.py"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    assert commit_of(script) == head.stdout.strip()
    script.write_text("changed")
    assert commit_of(script) == f"{head.stdout.strip()}-dirty"
