"""Processes with other settings, or other code, than rank 0's: none of them begins."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from dbsl.base.errors import SettingError
from dbsl.run.folder import check_alike
from tests.helpers import free_port, short, start_rank, to_flags, wait_all
from train import Config

FILES = {"train.py": b"a", "dbsl/open.py": b"b"}


def rank_with(rank, unlike):
    """Compare, as one of several of which some are unlike; return what is said."""
    settings, files = unlike.get(rank, ({}, FILES))
    place = {"num_processes": dist.get_world_size(), "process_index": rank}
    state = SimpleNamespace(device=torch.device("cpu"), **place)
    try:
        check_alike(replace(Config(lr=0.2), **settings), files, state)
    except SettingError as error:
        return str(error)
    return ""


UNLIKE = [
    ({2: ({"lr": 0.3}, FILES)}, "lr must be .*, got 0.2 on rank 0, 0.3 on rank 2"),
    (
        {1: ({"sync": "step", "epochs": 9}, FILES), 2: ({"lr": 0.3}, FILES)},
        r"sync must be .*, got bsp on rank 0, step on rank 1 \(also different: epochs\)",
    ),
    (
        {1: ({}, FILES | {"train.py": b"c", "new.py": b"d"})},
        r"code of train.py must be .*, got \w{12} on rank 0, \w{12} on rank 1",
    ),
    ({1: ({}, {"mine.py": b"a"})}, "the script .* train.py on rank 0, mine.py on rank 1"),
    ({1: ({"cpu_threads": 7, "loader_workers": 2}, {"train.py": b"a", "new.py": b"d"})}, ""),
]


def with_each(rank):
    return [rank_with(rank, unlike) for unlike, _ in UNLIKE]


def test_every_process_ends_with_the_line_that_names_what_is_not_the_same(run_ranks):
    first, *others = run_ranks(with_each, world_size=3)
    assert others == [first] * 2
    for found, (_, said) in zip(first, UNLIKE, strict=True):
        assert re.fullmatch(said, found)


@pytest.mark.parametrize(
    ("own", "other", "name"),
    short(
        [
            ({"lr": 0.2}, {"lr": 0.3}, "lr"),
            ({"sync": "step"}, {"sync": "asp"}, "sync"),
            ({"sync": "ssp"}, {"sync": "asp"}, ""),
            ({}, {"plan_only": True}, "plan_only"),
            ({"mixed_precision": "auto"}, {"mixed_precision": "bf16"}, "mixed_precision"),
        ],
        ({"lr": 0.2}, {"lr": 0.3}, "lr"),
    ),
)
def test_two_launches_with_other_flags_end_with_one_line_and_leave_nothing(
    tmp_path, own, other, name
):
    port = free_port()
    flags = [to_flags(tmp_path / "run", **settings) for settings in (own, other)]
    ranks = [start_rank(flags[rank], rank, 2, port) for rank in range(2)]
    assert wait_all(ranks) == [2, 2], [rank.stderr for rank in ranks]
    (line,) = ranks[0].stderr.splitlines()  # that of each machine's first process
    assert name in line.partition(" must be ")[0]
    assert not (tmp_path / "run").exists()
