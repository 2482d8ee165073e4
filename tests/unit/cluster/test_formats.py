import math

import pytest
import torch
from torch import nn

from dbsl.cluster import formats
from dbsl.cluster.formats import BLOCK, Rounding, decode, encode, message_bytes
from dbsl.cluster.merges import share_of_mean
from dbsl.cluster.weights import FlatWeights

FORMATS = ("bf16", "int8", "int4", "int2")
# Of numbers with a normal distribution: mean squared error over their mean square.
ERRORS = {"bf16": 5e-6, "int8": 1e-4, "int4": 0.025, "int2": 0.25}


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def rounded(rounding, numbers):
    return decode(rounding.encode(numbers), rounding.wire, numbers.dtype)


@pytest.fixture
def weights():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(72, 30))
    return FlatWeights(model.to(memory_format=torch.channels_last))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("wire", FORMATS)
def test_numbers_come_back_with_the_error_that_their_format_has(wire, dtype):
    numbers = normal(3, 4 * BLOCK, dtype=dtype) * torch.tensor([[1e-6], [1.0], [1e6]])
    message = encode(numbers, wire)
    back = decode(message, wire, dtype)
    assert message.dtype == torch.uint8
    assert message.shape == (3, message_bytes(wire, 4 * BLOCK, 0))
    assert back.dtype == dtype
    errors = (back - numbers).square().mean(1) / numbers.square().mean(1)
    assert (errors < ERRORS[wire]).all()
    assert (errors > 0).all()


@pytest.mark.parametrize("wire", FORMATS)
def test_blocks_of_zeros_and_of_the_smallest_numbers_come_back_finite(wire):
    numbers = torch.zeros(1, 2 * BLOCK)
    numbers[0, BLOCK] = 1e-45
    back = decode(encode(numbers, wire), wire, torch.float32)
    assert not back[0, :BLOCK].any()
    assert (back.abs() <= 1e-44).all()


@pytest.mark.parametrize("wire", ["int8", "int4", "int2"])
def test_a_scale_for_each_number_gives_the_numbers_themselves(monkeypatch, wire):
    monkeypatch.setattr(formats, "BLOCK", 1)
    numbers = normal(2, 64, dtype=torch.float64)
    back = decode(encode(numbers, wire), wire, torch.float64)
    torch.testing.assert_close(back, numbers, rtol=1e-6, atol=0)


@pytest.mark.parametrize("wire", FORMATS)
def test_what_is_sent_and_what_is_left_come_to_the_sum_of_what_there_was(wire):
    rounding, sent, total = Rounding(wire), 0.0, 0.0
    for number in range(50):
        change = normal(1, 2 * BLOCK, seed=number, dtype=torch.float64) * 2.0**-number
        sent, total = sent + rounded(rounding, change), total + change
    torch.testing.assert_close(sent + rounding.left, total, rtol=1e-6, atol=1e-9)


def test_matrices_and_the_rest_of_a_vector_make_it_again(weights):
    matrices, rest = weights.split(weights.vector)
    sizes = [t.numel() for t in weights.tensors if t.dim() > 1]
    assert len(matrices) == sum(-(-size // 64) * 64 for size in sizes)
    assert len(rest) == len(weights.vector) - len(matrices)
    assert torch.equal(weights.join(matrices, rest), weights.vector)


def test_bytes_count_scales_and_what_stays_whole():
    assert message_bytes("float32", 1000, 24) == 4 * 1024
    assert message_bytes("bf16", 1024, 10) == 2 * 1024 + 40
    blocks = math.ceil(1000 / BLOCK)
    assert message_bytes("int4", 1000, 24) == blocks * (BLOCK // 2 + 4) + 96
    assert message_bytes("int2", 1000, 24) == blocks * (BLOCK // 4 + 4) + 96


@pytest.mark.parametrize("size", [1e-4, 1e-2, 1.0])
def test_small_numbers_of_float16_keep_their_sign(size):
    numbers = (torch.linspace(-size, size, 4 * BLOCK)[None]).half()
    share = share_of_mean(numbers, 1.0, 1.0)  # what travels
    back = decode(encode(share, "int8"), "int8", share.dtype)
    assert (back - numbers.float()).abs().max() <= size / 127 + 1e-7
