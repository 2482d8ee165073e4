"""The snippets of docs/library.md run as they stand, and train as one process on all samples."""

import os
import re
import warnings
from contextlib import nullcontext
from pathlib import Path
from textwrap import indent

import numpy as np
import pytest
import torch
import torch._dynamo  # once, not in each process
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import dbsl
from tests.helpers import ROOT, place_of

PAGE = (ROOT / "docs/library.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def block(words):
    (found,) = (text for text in BLOCKS if words in text)
    return found


LOOP = block("import dbsl")
# A snippet that is a part of a loop stands in the page's own loop.
TOKENS = LOOP.replace(
    " * loader.scale(len(labels))  # n * b_i / B\n        loss.backward()\n",
    "\n        tokens = len(labels)\n" + indent(block("mean_scale"), 8 * " "),
)
DIFF = re.search(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
README = "".join(line[1:] for line in DIFF.splitlines(True) if not line.startswith("-"))
LOOPS = {"readme": README, "plain": LOOP}
LOOPS |= {"accelerate": block("import prepare"), "accumulate": block("GradScaler")}
LOOPS["tokens"] = TOKENS


def names_of_a_loop(rank, world_size):
    """Return what the page's loops find there."""
    os.environ.update(place_of(rank, world_size))
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    inputs = torch.randn(1000, 4)
    modules = {"dbsl": dbsl, "dist": dist, "torch": torch, "nullcontext": nullcontext}
    modules |= {"DataLoader": DataLoader, "DistributedDataParallel": DistributedDataParallel}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    names = {"model": model, "optimizer": optimizer, "criterion": nn.CrossEntropyLoss()}
    names["dataset"] = dataset = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    names["loader"] = DataLoader(dataset, batch_size=256 // world_size, shuffle=True)
    return modules | names | {"epochs": 2, "device": "cpu"}


def run(rank, code, world_size=2):
    """Execute a snippet and return the names that it leaves."""
    there = names_of_a_loop(rank, world_size)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message=".*CUDA")
    if "accelerator" in code:
        there["accelerator"] = Accelerator(cpu=True, gradient_accumulation_steps=2)
    exec(code, there)
    return there


def train(rank, code, world_size):
    parameters = run(rank, code, world_size)["optimizer"].param_groups[0]["params"]
    return nn.utils.parameters_to_vector(parameters).detach().numpy()


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_of_the_page_trains_as_one_process_on_the_joint_batch(run_ranks, name):
    one, other = run_ranks(train, LOOPS[name], 2)
    assert (one == other).all()
    assert "[183, 73]" in LOOPS[name]
    (alone,) = run_ranks(train, LOOPS[name].replace("[183, 73]", "[256]"), 1, world_size=1)
    assert np.abs(one - alone).max() < 1e-9
    if name == "plain":  # the control
        (other,) = run_ranks(train, "", 1, world_size=1)
        assert np.abs(one - other).max() > 0.01


def balance(rank):
    there = run(rank, block("watch(model)") + LOOP[LOOP.index("\nfor epoch") :])
    return there["loader"].local_batch_sizes


def test_the_snippet_on_balance_runs(run_ranks):
    sizes, others = run_ranks(balance)
    assert sizes == others
    assert sum(sizes) == 256


def rounds(rank):
    setup = "shard = [183, 73][dist.get_rank()] * [0]\n"
    there = run(rank, setup + block("Rounds"))
    return there["rounds"].merges, there["model"][0].weight.tolist()


def test_the_snippet_on_rounds_runs_and_all_end_with_the_same_weights(run_ranks):
    one, other = run_ranks(rounds)
    assert one == other
    assert one[0] == 1


def plan(rank):
    setup = (
        "one_step = lambda size: criterion(model(torch.ones(size, 4)), torch.ones(size).long())\n"
    )
    there = run(rank, setup + block("measure_step").replace("seconds=20", "seconds=0"))
    return sum(there["loader"].local_batch_sizes), len(there["plan"].workers)


def test_the_snippet_on_plans_runs(run_ranks, capfd):
    assert run_ranks(plan) == [(256, 4)] * 2


def resume(rank, epochs):
    saving = LOOP.replace("epochs", "1", 1) + block('"loader": loader.state_dict()')
    again = block("load_state_dict") + LOOP[LOOP.index("    for inputs") :]
    anew = "loader = DataLoader(dataset, batch_size=128, shuffle=True)\n"
    anew += LOOP[LOOP.index("loader =") : LOOP.index("model =")]
    return train(rank, saving + anew + again if epochs == 1 else LOOP, 2)


def test_the_snippets_on_resuming_train_as_if_never_stopped(run_ranks):
    stopped, whole = run_ranks(resume, 1), run_ranks(resume, 2)
    assert all((a == b).all() for a, b in zip(stopped, whole, strict=True))


def checking(rank):
    loss = "loss_of = lambda model, batch: (\n    criterion(model(batch[0]), batch[1])"
    loss += " * loader.scale(len(batch[1]))\n)\n"
    code = block("dbsl.check").replace("print(", "said = (")
    return run(rank, LOOP[: LOOP.index("\nfor epoch")] + loss + code)["said"]


def test_the_snippet_that_checks_says_equal(run_ranks):
    assert all(said.startswith("equal (") for said in run_ranks(checking))


@pytest.mark.parametrize(
    ("words", "example"),
    [("UnevenTrainerMixin, Trainer", "trainer_lm"), ("Uneven, lightning", "lightning_module")],
)
def test_snippets_of_loops_that_need_a_framework_stand_in_an_example(words, example):
    theirs = (ROOT / f"examples/own_loop/{example}.py").read_text()
    code = [line.strip() for line in re.sub(r'"""[^"]*"""\n', "", theirs).splitlines()]
    for line in block(words).splitlines():
        assert line.strip() in code


def test_every_snippet_is_run():
    text = Path(__file__).read_text()
    words = [
        *re.findall(r"""block\(["'](.*?)["']\)""", text),
        "Mixin, Trainer",
        "Uneven, lightning",
    ]
    assert {block(w) for w in words if w in PAGE} == {*BLOCKS}
