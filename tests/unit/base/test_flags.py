"""Flags of a dataclass, read by argparse: what it would refuse or guess is read as it stands."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, make_dataclass
from pathlib import Path
from typing import Literal

import pytest
import yaml

from dbsl.config.parse import POSITIONAL, REPEATED, config_to_yaml, parse_flags, yaml_to_argv
from dbsl.config.settings import RunConfig


@dataclass(frozen=True)
class Settings:
    """Settings of each form."""

    epochs: int  # number of epochs
    lr: float | None = 0.1  # learning rate
    sizes: tuple[int, ...] | Literal["auto"] = "auto"  # batch sizes
    names: tuple[str, ...] = ()  # any names
    note: str = ""  # 100 % of the text
    save_best: bool = True  # save the best
    fast: Literal["auto"] | bool = "auto"  # a switch, or auto


@dataclass(frozen=True)
class Command:
    """Settings of a command that takes values without a flag."""

    arms: tuple[str, ...] = field(metadata=POSITIONAL)  # files
    seeds: int = 1  # number of seeds
    set: tuple[str, ...] = field(default=(), metadata=REPEATED)  # other settings
    dry: bool = False  # run nothing


def read(*flags, cls=Settings):
    return parse_flags(cls, [*flags, "--epochs", "1"] if cls is Settings else flags)


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        *((["--lr", number], {"lr": -0.001}) for number in ("-1e-3", "-.001", "-0.001")),
        (["--lr=-1e-3"], {"lr": -0.001}),
        (["--note", "-o x", "--names", "-", "-a,-b"], {"note": "-o x", "names": ("-", "-a", "-b")}),
        (["--note=--lr", "--sizes", "-1", "2"], {"note": "--lr", "sizes": (-1, 2)}),
        (["--lr", "1", "--lr", "None"], {"lr": None}),
        (["--sizes", "1,2", "--sizes", "3"], {"sizes": (3,)}),
        (["--sizes", "1", "--sizes", "unset", "--lr", "unset"], {"sizes": "auto", "lr": None}),
        (["--note", "a", "--note", "unset", "--names", "unset"], {"note": "", "names": ()}),
        (["--save-best", "--no-save-best", "--sizes"], {"save_best": False, "sizes": ()}),
        (["--no_save_best", "--save-best"], {"save_best": True}),
        (["--fast", "--lr", "1"], {"fast": True, "lr": 1.0}),
        (["--fast", "auto", "--no-fast"], {"fast": False}),
        (["--no-fast", "--fast=auto"], {"fast": "auto"}),
        (["--fast", "false"], {"fast": False}),
    ],
)
def test_numbers_and_texts_may_begin_with_a_dash_and_the_last_flag_counts(flags, found):
    assert vars(read(*flags)).items() >= found.items()


def test_values_without_a_flag_may_stand_anywhere():
    flags = ("a.yaml", "--dry", "b.yaml", "--set", "lr=1,2", "--seeds", "3", "-c", "--set", "x=-1")
    expected = Command(("a.yaml", "b.yaml", "-c"), 3, ("lr=1,2", "x=-1"), True)
    assert read(*flags, cls=Command) == expected


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--epoch", "2"], "flag must be one that --help lists, such as --epochs, got --epoch"),
        (["--no-lr"], "flag must be one that --help lists.*, got --no-lr"),
        (["--epochs", "unset"], "--epochs must be a whole number, got 'unset'"),
        (["--epochs", "None"], "--epochs must be a whole number, got 'None'"),
        (["--note", "a", "b"], "--note must be a text, got 'a b'"),
        (["--fast", "2"], "--fast must be auto or true or false, got '2'"),
        (["--save-best=yes"], r"--save-best must have no value \(--no-save-best: off\), got 'yes'"),
        (["--lr", "1"], "--epochs must be given"),
    ],
)
def test_what_is_wrong_is_one_line(flags, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        parse_flags(Settings, flags)


def test_help_wins_over_wrong_flags_and_one_process_prints_it(monkeypatch, capsys):
    for rank, printed in (("0", True), ("1", False)):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as ended:
            read("--lr", "x", "-h")
        text = " ".join(capsys.readouterr().out.split())
        assert (ended.value.code, "--note TEXT 100 % of the text" in text) == (0, printed)


@dataclass(frozen=True)
class Forked:
    """Settings that a fork of train.py may add."""

    frozen: tuple[str, ...] = ()  # modules
    steps: tuple[int, ...] | None = None  # numbers
    fast: Literal["auto"] | bool = "auto"  # a switch, or auto


def test_a_forks_settings_go_through_yaml_and_a_type_that_does_not_is_named():
    found = parse_flags(Forked, ["--frozen", "layer1,layer2", "--steps", "3", "6"])
    assert found == Forked(("layer1", "layer2"), (3, 6))
    for settings in (found, *(Forked(fast=fast) for fast in ("auto", True, False))):
        flags = yaml_to_argv(yaml.safe_load(config_to_yaml(asdict(settings))))
        assert parse_flags(Forked, flags) == settings
    for kind in (Path | None, list[str]):
        bad = make_dataclass("Bad", [("own", kind, None)], bases=(RunConfig,), frozen=True)
        with pytest.raises(TypeError, match=r"Bad.own must be of bool, .* or a tuple of one, got "):
            parse_flags(bad, [])
