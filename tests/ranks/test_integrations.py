"""Frameworks' own loops with a size for each process: as one process on the joint batch."""

import importlib
import os
import tempfile
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.helpers import place_of

STEPS = 6


def begin(rank, sizes):
    warnings.simplefilter("ignore")
    os.environ.update(place_of(rank, len(sizes), TORCHELASTIC_RUN_ID="one", GROUP_RANK=0))
    torch.set_default_dtype(torch.float64)


def vector(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()]).numpy()


def sentences(count=90):
    draw = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(count):
        words = torch.randint(
            1, 100, (int(torch.randint(3, 13, (1,), generator=draw)),), generator=draw
        )
        rows.append({"input_ids": words.tolist(), "labels": int(words[0] >= 50)})
    return rows


def trainer(rank, sizes, stop=None, own_loss=False):
    """Train a classifier, grouped by length, with accumulation; or stop, and go on anew."""
    begin(rank, sizes)
    from transformers import Trainer, TrainingArguments

    from dbsl.integrations.transformers import UnevenTrainerMixin
    from examples.own_loop.accelerate_bert import build_model

    class Uneven(UnevenTrainerMixin, Trainer):
        local_batch_sizes = sizes

    if own_loss:  # a mean over samples that knows nothing of the mixin

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return model(**inputs).loss

        Uneven.compute_loss = compute_loss

    def pad(rows):
        longest = max(len(row["input_ids"]) for row in rows)
        ids = torch.tensor([r["input_ids"] + [0] * (longest - len(r["input_ids"])) for r in rows])
        labels = torch.tensor([row["labels"] for row in rows])
        return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}

    folder, data = stop or tempfile.mkdtemp(), sentences()
    for steps in (2, STEPS) if stop else (STEPS,):
        torch.manual_seed(0)
        arguments = TrainingArguments(
            folder,
            max_steps=steps,
            gradient_accumulation_steps=2,
            learning_rate=0.1,
            lr_scheduler_type="constant",
            optim="sgd",
            max_grad_norm=0.0,
            use_cpu=True,
            report_to="none",
            save_steps=2,
            train_sampling_strategy="group_by_length",
        )
        model = build_model()
        own = Uneven(model, arguments, train_dataset=data, data_collator=pad)
        found = own.train(resume_from_checkpoint=steps == STEPS and stop is not None)
    return vector(model), found.training_loss


def accelerated(rank, sizes):
    """Accelerate's loop with accumulation."""
    begin(rank, sizes)
    from accelerate import Accelerator

    from dbsl.integrations.accelerate import prepare

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    data = torch.randn(43, 4, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(data, 4, shuffle=True)
    torch.manual_seed(1)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, loader = prepare(
        accelerator, model, optimizer, loader, local_batch_sizes=sizes
    )
    for epoch in range(2):
        loader.set_epoch(epoch)
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(batch).square().mean() * loader.scale(len(batch))
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    return vector(model), len(loader)


def lightning(rank, sizes):
    """Lightning's loop with accumulation; the loss that is logged is the process's own mean."""
    begin(rank, sizes)
    import lightning as pl

    import dbsl
    from dbsl.integrations.lightning import Uneven

    class Model(Uneven, pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def training_step(self, batch, number):
            loss = self.layer(batch).square().mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

        def train_dataloader(self):
            data = torch.randn(43, 4, generator=torch.Generator().manual_seed(0))
            return dbsl.uneven(DataLoader(data, 4, shuffle=True), sizes, accumulate=2)

    torch.manual_seed(1)
    model = Model().double()
    fit = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=len(sizes),
        strategy="ddp" if len(sizes) > 1 else "auto",
        accumulate_grad_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    fit.fit(model)
    return vector(model), 0.0


LOOPS = {trainer: "transformers", accelerated: "accelerate", lightning: "lightning"}


@pytest.mark.parametrize("loop", LOOPS, ids=LOOPS.values())
def test_a_frameworks_loop_trains_as_one_process_on_the_joint_batch(run_ranks, tmp_path, loop):
    pytest.importorskip(LOOPS[loop])
    if loop is trainer:
        importlib.import_module("transformers.trainer")  # once, before the forks
    (joined,) = run_ranks(loop, [8], world_size=1)
    one, other = run_ranks(loop, [2, 6])
    assert (one[0] == other[0]).all()
    assert abs(one[0] - joined[0]).max() < 1e-9
    assert one[1] == pytest.approx(other[1]) == pytest.approx(joined[1])
    if loop is trainer:  # it goes on inside an epoch to the same weights
        stopped, _ = run_ranks(trainer, [2, 6], str(tmp_path / "run"))
        assert (stopped[0] == one[0]).all()
        replaced, _ = run_ranks(trainer, [2, 6], None, True)
        assert abs(replaced[0] - joined[0]).max() < 1e-9


def test_a_trainer_that_cannot_be_right_is_refused():
    from dbsl.base.errors import SettingError
    from dbsl.integrations.transformers import UnevenTrainerMixin

    class Stock:
        __module__ = "transformers.trainer"

    with pytest.raises(SettingError, match="base classes must begin with UnevenTrainerMixin"):
        type("Late", (Stock, UnevenTrainerMixin), {})
    typo = type("Typo", (UnevenTrainerMixin, Stock), {"local_batch_size": (4, 8)})()
    own = type("Own", (UnevenTrainerMixin, Stock), {"local_batch_sizes": (4, 8)})()
    for each, must in (
        (typo, "local_batch_sizes, balance or lengths of Typo must be set, got unset"),
        (own, "average_tokens_across_devices must be True, got false"),
    ):
        each.args = SimpleNamespace(average_tokens_across_devices=False, world_size=2)
        each.accelerator = None
        with pytest.raises(SettingError, match=must):
            each.get_train_dataloader()
