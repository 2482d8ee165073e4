from types import SimpleNamespace

import pytest
import timm.loss
import torch
from timm.data.mixup import mixup_target

import train
from dbsl.loss import check_loss
from train import Config, loss_function

AS_IT_IS = torch.nn.Identity()  # a model whose inputs are logits


@pytest.fixture
def logits():
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


LABELS = torch.tensor([0, 1, 2, 3, 1, 1])


def test_cross_entropy_smooths_mixed_labels_as_timm_does(logits):
    mixed, plain = (mixup_target(LABELS, 4, 0.7, smoothing) for smoothing in (0.1, 0.0))
    found, _ = loss_function(AS_IT_IS, logits, plain, Config(label_smoothing=0.1))
    torch.testing.assert_close(found, timm.loss.SoftTargetCrossEntropy()(logits, mixed))


@pytest.mark.parametrize("classes", [4, 7])
def test_top5_counts_labels_among_the_five_highest(classes):
    logits = torch.randn(40, classes, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(40) % classes
    batches = [(logits[:30], labels[:30]), (logits[30:], labels[30:])]
    training = SimpleNamespace(
        model=torch.nn.Identity(),
        accelerator=SimpleNamespace(device="cpu", autocast=torch.no_grad),
        data=SimpleNamespace(num_classes=classes, evaluation=None),
        workers=SimpleNamespace(
            evaluation_batches=lambda source: batches, sum_of_processes=lambda totals: totals
        ),
    )
    result = train.evaluate(training)
    order = logits.argsort(1, descending=True)[:, :5]
    assert result["samples"] == 40
    assert result["accuracy"] == pytest.approx((order[:, 0] == labels).float().mean())
    wanted = (order == labels[:, None]).any(1).float().mean().item()
    assert result.get("top5_accuracy") == (None if classes == 4 else pytest.approx(wanted))


class Keeping(torch.nn.Module):
    """A layer that keeps a tensor of its pass, and one that its result does not use."""

    def __init__(self):
        super().__init__()
        self.used, self.spare = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)

    def forward(self, images):
        self.kept = self.used(images)
        return self.kept


def test_a_first_call_of_the_loss_leaves_the_model_alone_and_finds_what_nothing_uses():
    def found(model, images, labels, config):
        return model(images).square().mean(), {"kept": model.kept.mean()}

    model, batch = Keeping(), (torch.ones(2, 3), torch.zeros(2))
    assert check_loss(found, model, batch, None) == ["spare.weight", "spare.bias"]
    assert not hasattr(model, "kept")
    assert all(parameter.grad is None for parameter in model.parameters())
    model.spare.requires_grad_(False)
    assert check_loss(found, model, batch, None) == []
