from contextlib import suppress

import pytest
import timm
import torch
from torch import nn

from dbsl.base.errors import SettingError
from dbsl.cluster.weights import ALIGNMENT, FlatWeights


def test_model_and_vector_are_one_memory_and_the_model_computes_as_before():
    torch.manual_seed(0)
    model = timm.create_model("resnet18", num_classes=5).eval()
    model.to(memory_format=torch.channels_last)
    images = torch.randn(2, 3, 32, 32)
    before = model(images)
    weights = FlatWeights(model)
    assert torch.equal(model(images), before)
    assert model.conv1.weight.is_contiguous(memory_format=torch.channels_last)
    weights.vector.zero_()
    assert all(not p.any() for p in model.parameters())


def test_vector_holds_parameters_and_running_statistics_but_no_integers():
    model = torch.nn.BatchNorm2d(4)
    weights = FlatWeights(model)
    found = [tensor.tolist() for tensor in weights.tensors]
    assert found == [[1.0] * 4, [0.0] * 4, [0.0] * 4, [1.0] * 4]
    assert len(weights.buffers) == 2 * ALIGNMENT
    assert weights.vector.sum() == 8  # the gaps are zeros
    model.register_buffer("mask", torch.full((2, 2), -torch.inf), persistent=False)
    assert torch.equal(FlatWeights(model).vector, weights.vector), "a constant is left out"


@pytest.mark.parametrize("name", ["resnet18", "efficientnet_b0"])
def test_tensors_are_aligned_as_compiled_kernels_take_them_to_be(name):
    with torch.device("meta"):
        model = timm.create_model(name, num_classes=10)
    model = model.to_empty(device="cpu")
    weights = FlatWeights(model)
    weights.attach_gradients(torch.zeros_like(weights.vector))
    for tensor in (*weights.tensors, *(p.grad for p in model.parameters())):
        assert tensor.storage_offset() * tensor.element_size() % 256 == 0


def test_weights_and_counters_are_as_before_after_a_while_with_others():
    model = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1))
    weights = FlatWeights(model)
    before = weights.vector.clone()
    with suppress(RuntimeError), weights.kept():
        weights.load(torch.zeros_like(before))
        model(torch.ones(3, 2))
        raise RuntimeError
    assert torch.equal(weights.vector, before)
    assert model[1].num_batches_tracked == 0


ELSEWHERE = {
    "0.running_mean": lambda model: setattr(model[0], "running_mean", torch.zeros(3)),
    "0.weight": lambda model: setattr(model[0].weight, "data", torch.zeros(3)),
    "1.weight": lambda model: setattr(model, "1", nn.Linear(3, 2)),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_tensor_that_the_model_has_elsewhere_is_refused(name):
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    weights = FlatWeights(model)
    weights.check_views()
    model[0].running_mean.mul_(2)
    weights.check_views()
    ELSEWHERE[name](model)
    for _ in range(2):
        with pytest.raises(SettingError, match=f"model must change {name} in place, got another"):
            weights.check_views()
