"""A run keeps the code that it trains with, and says if that has changed."""

import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

import dbsl.open
from dbsl.extras import code
from dbsl.extras.code import KeptCode, kept_code
from dbsl.run.folder import Code, read_code, script_of
from tests.helpers import run

GIT_DIFF = code.git_diff  # before conftest takes it away


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
    assert script_of(found.sums) == "mine.py"
    assert found.files["mine.py"] == b"import losses\n"
    assert found.files["losses.py"] == b"smooth = 0.1\n"
    assert "dbsl/run/folder.py" in found.sums
    assert not {"__mp_main__.py", "pytest/__init__.py"} & {*found.files}
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace())  # as in a notebook
    found = read_code()
    assert script_of(found.sums) == ""
    assert {"losses.py", "dbsl/__init__.py"} <= {*found.sums}


def test_code_is_kept_though_an_earlier_folder_is_gone(script, tmp_path):
    folder = tmp_path / "run"
    for number in range(4):
        (tmp_path / "losses.py").write_text(f"smooth = {number}\n")
        folder.mkdir(exist_ok=True)
        KeptCode().write(folder, read_code())
        if number == 2:
            shutil.rmtree(folder / "code-2")
    assert [path.name for path in kept_code(folder)] == ["code", "code-3", "code-4"]


def test_code_that_has_changed_is_named_and_kept_beside_what_it_was(script, tmp_path, capsys):
    folder = tmp_path / "run"
    folder.mkdir()
    for _ in range(2):
        KeptCode().write(folder, read_code())
    assert [path.name for path in kept_code(folder)] == ["code"]
    assert capsys.readouterr().out == ""
    (tmp_path / "losses.py").write_text("smooth = 0.2\n")
    KeptCode().write(folder, read_code())
    assert capsys.readouterr().out.endswith("has changed since the run began: losses.py\n")
    shutil.copytree(folder / "code", folder / "code-old")  # by hand
    assert [path.name for path in kept_code(folder)] == ["code", "code-2"]
    assert (folder / "code/losses.py").read_text() == "smooth = 0.1\n"
    assert (folder / "code-2/losses.py").read_text() == "smooth = 0.2\n"
    assert KeptCode.in_words(folder) == (
        "`mine.py` (kept in `code/` of the run folder), after a resume by "
        "`mine.py` (kept in `code-2/` of the run folder)"
    )
    assert {path.name for path in folder.iterdir()} == {"code", "code-2", "code-old"}
    assert {path.name for path in (folder / "code").iterdir()} >= {"mine.py", "SHA256SUMS"}
    assert not (folder / "code/dbsl").exists()


def test_a_checkout_leaves_its_commit_and_its_changes_and_others_nothing(
    script, tmp_path, monkeypatch
):
    assert GIT_DIFF() == b""  # no checkout
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], check=True)
    script.write_text("import losses, os\n")
    commit, _, changes = GIT_DIFF().partition(b"\n")
    assert len(commit) == len("commit ") + 40
    assert b"+import losses, os" in changes
    monkeypatch.setattr(code, "git_diff", GIT_DIFF)
    (folder := tmp_path / "run").mkdir()
    KeptCode().write(folder, read_code())
    words = f"at git {commit.decode()} with the changes in `code/git.diff`"
    assert KeptCode.in_words(folder).endswith(words)
    monkeypatch.setenv("PATH", "")
    assert GIT_DIFF() == b""  # no git


def test_a_resumed_run_says_which_code_has_changed_and_the_card_has_both(
    tmp_path, monkeypatch, capsys
):
    folder, warning = tmp_path / "run", "warning: code has changed since the run began"
    # The script by another name.
    monkeypatch.delitem(sys.modules, "dbsl_train_script", raising=False)
    monkeypatch.setattr(dbsl.open, "read_code", read_code)
    run(folder, epochs=1)
    assert (folder / "code/train.py").exists()
    run(folder, epochs=2, resume=str(folder))
    assert warning not in capsys.readouterr().out
    other = Code({"train.py": b""})
    monkeypatch.setattr(dbsl.open, "read_code", lambda: other)
    run(folder, epochs=3, resume=str(folder))
    assert f"{warning}: train.py" in capsys.readouterr().out
    card = (folder / "README.md").read_text()
    assert "after a resume by `train.py` (kept in `code-2/` of the run folder)" in card
    assert "To train it again" not in card
    before = sorted(folder.rglob("*"))
    run(folder, epochs=3, resume="auto", eval_only=True)
    assert sorted(folder.rglob("*")) == before
