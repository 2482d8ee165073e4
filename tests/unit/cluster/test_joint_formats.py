"""What joint steps send in fewer bytes, what stays behind, and what is refused."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dbsl.base.errors import SettingError
from dbsl.cluster.formats import LowRank, check_rank, joint_messages, trained_shapes
from dbsl.config.settings import FLOAT32, Wire, parse_wire

ROWS, COLUMNS, REST = 24, 40, 5


@pytest.fixture(scope="module", autouse=True)
def group():
    """Have a group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make_gradients():
    """Return a vector with room for a matrix and a bias, and both as they lie in it."""
    flat = torch.zeros(ROWS * COLUMNS + REST, dtype=torch.float64)
    matrix, bias = flat.split([ROWS * COLUMNS, REST])
    return flat, [matrix.view(ROWS, COLUMNS), bias]


def sums(low_rank, draw, steps=50):
    """Return the sum of what was given and of what was applied, over so many steps."""
    flat, gradients = make_gradients()
    given, applied = torch.zeros_like(flat), torch.zeros_like(flat)
    for step in range(steps):
        flat.copy_(draw(step))
        given += flat
        applied += low_rank(flat, gradients).wait()
    return given, applied


def noise(step):
    generator = torch.Generator().manual_seed(step)
    shape = (ROWS * COLUMNS + REST,)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("rank", [1, 2, 4])  # orthogonalised in two ways
@pytest.mark.parametrize("steps", [0, 3])
def test_what_was_applied_and_what_is_left_is_what_was_given(rank, steps):
    low_rank = LowRank(Wire("powersgd", rank, steps))
    given, applied = sums(low_rank, noise)
    (left,) = low_rank.state.error_dict.values()
    torch.testing.assert_close(applied + left, given, rtol=1e-9, atol=1e-9)
    assert left.norm() > 0.1 * given.norm()
    assert not left[-REST:].any()  # a vector goes as it is
    flat, gradients = make_gradients()
    assert torch.linalg.matrix_rank(low_rank(flat, gradients).wait()[:-REST].view(ROWS, -1)) == rank


def test_the_first_steps_go_as_they_are():
    low_rank = LowRank(Wire("powersgd", 1, 3))
    given, applied = sums(low_rank, noise, steps=3)
    assert torch.equal(given, applied)
    given, applied = sums(low_rank, noise, steps=1)
    assert not torch.allclose(given, applied)


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_a_layer_without_a_gradient_at_first_is_trained_once_it_has_one(rank):
    """A residual branch that begins at zero, in timm's models, has none in the first step."""
    low_rank = LowRank(Wire("powersgd", rank))
    given, applied = sums(low_rank, lambda step: noise(0) * (step >= 3), steps=100)
    assert applied.isfinite().all()
    assert (applied - given).norm() < 0.3 * given.norm()


def test_nothing_of_a_step_that_was_not_finite_is_left_once_it_is_reset():
    low_rank = LowRank(Wire("powersgd", 2))
    sums(low_rank, lambda step: noise(step) * float("nan"), steps=2)
    low_rank.reset()
    assert sums(low_rank, noise)[1].isfinite().all()


def test_another_layer_frozen_is_a_beginning_without_remainders_and_the_same_is_not():
    low_rank = LowRank(Wire("powersgd", 2, 1))
    low_rank.begin([True, True])
    sums(low_rank, noise, steps=5)
    low_rank.begin([True, True])
    assert low_rank.state.error_dict
    low_rank.begin([False, True])
    assert not low_rank.state.error_dict
    assert low_rank.state.iter == 0


def test_what_is_kept_goes_on_from_a_checkpoint_to_the_same_bits_but_not_at_another_rank():
    whole, first, then = (LowRank(Wire("powersgd", 2, 1)) for _ in range(3))
    for one in (whole, first):
        one.begin([True, True])
        sums(one, noise, steps=3)
    then.load_state_dict(first.state_dict(), torch.device("cpu"))
    then.begin([True, True])
    for one in (whole, then):
        found = sums(one, noise)[1]
    assert torch.equal(sums(whole, noise)[1], sums(then, noise)[1])
    assert found.isfinite().all()
    other = LowRank(Wire("powersgd", 3, 1))
    other.load_state_dict(first.state_dict(), torch.device("cpu"))
    assert not other.state.error_dict


SHAPES = [(64, 3, 3, 3), (64,), (128, 64, 3, 3), (), (10, 128)]


class Scalar(nn.Module):
    def __init__(self):
        super().__init__()
        self.tensors = nn.ParameterList(torch.randn(shape) for shape in SHAPES)


@pytest.mark.parametrize("rank", [1, 2, 4, 16, 60])
def test_bytes_are_those_that_the_hook_sends(monkeypatch, rank):
    sent, all_reduce = [], dist.all_reduce

    def counted(tensor, **how):
        sent.append(tensor.nbytes)
        return all_reduce(tensor, **how)

    monkeypatch.setattr(dist, "all_reduce", counted)
    shapes = trained_shapes(Scalar())
    assert list(map(tuple, shapes)) == SHAPES
    wire = Wire("powersgd", rank)
    flat = torch.randn(sum(shape.numel() for shape in shapes))
    pieces = flat.split([shape.numel() for shape in shapes])
    LowRank(wire)(flat, [piece.view(s) for piece, s in zip(pieces, shapes, strict=True)]).wait()
    assert joint_messages(wire, shapes) == sent
    assert joint_messages(FLOAT32, shapes) == [flat.nbytes]
    assert joint_messages(Wire("bf16"), shapes) == [flat.nbytes // 2]


def test_a_rank_that_saves_nothing_is_refused_with_the_largest_that_does():
    shapes = trained_shapes(Scalar())

    def saves(rank):
        return joint_messages(Wire("powersgd", rank), shapes)[1] > 0

    most = max(rank for rank in range(1, 200) if saves(rank))
    check_rank(Wire("powersgd", most), shapes, "given")
    message = f"^wire must be powersgd with a rank of at most {most}: above.*, got powersgd:99$"
    with pytest.raises(SettingError, match=message):
        check_rank(Wire("powersgd", most + 1), shapes, "powersgd:99")
    message = "^wire must not be powersgd with a model that has no la"
    with pytest.raises(SettingError, match=message):
        check_rank(Wire("powersgd", 1), [torch.Size([7]), torch.Size([3, 3])], "powersgd:1")
    check_rank(Wire("bf16"), [torch.Size([7])], "bf16")


@pytest.mark.parametrize(
    ("text", "wire"),
    [
        ("float32", FLOAT32),
        ("int4", Wire("int4")),
        ("powersgd:4", Wire("powersgd", 4, 0)),
        ("powersgd:4:10", Wire("powersgd", 4, 10)),
        (f"powersgd:{10**20}:{10**20}", Wire("powersgd", 10**20, 10**20)),
    ],
)
def test_a_format_is_read(text, wire):
    assert parse_wire(text) == wire


@pytest.mark.parametrize(
    "text",
    ["", "int3", "powersgd", "powersgd:", "powersgd:-1", "powersgd:1.5", "powersgd:4:", "bf16:4",
     "powersgd:4:1:1", "powersgd:RANK[:STEPS]", f"powersgd:{'9' * 5000}"],
)  # fmt: skip
def test_what_is_no_format_is_refused(text):
    message = r"^wire must be float32, bf16, fp16, powersgd:RANK\[:ST"
    with pytest.raises(SettingError, match=message):
        parse_wire(text)
