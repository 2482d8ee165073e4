"""State as JSON and tensors: what comes out is what went in, to the bit."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dbsl.checkpoint.disk import pack, unpack

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.bool])
NUMBERS = st.one_of(st.booleans(), st.integers(-(2**60), 2**60), st.floats())
PLAIN = st.one_of(st.none(), NUMBERS, st.text(), DTYPES)
KEYS = st.one_of(st.text(max_size=5), st.integers(0, 9))
STATES = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(KEYS, inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
    ),
    max_leaves=20,
)


def through_json(state):
    tree, tensors = pack(state)
    return unpack(json.loads(json.dumps(tree)), tensors)


@given(STATES)
def test_plain_values_come_back_equal_and_of_the_same_types(state):
    assert repr(through_json(state)) == repr(state)


def test_tensors_come_back_to_the_bit_whatever_their_memory_order():
    nhwc = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    state = {
        1: (nhwc, torch.tensor(7)),
        "x": [torch.empty(0), torch.arange(3, dtype=torch.uint8), torch.randn(3).bfloat16()],
    }
    back = through_json(state)
    for a, b in ((state[1][0], back[1][0]), (state[1][1], back[1][1])):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    assert all(torch.equal(a, b) for a, b in zip(state["x"], back["x"], strict=True))


def test_one_tensor_in_many_places_is_kept_once_and_copied():
    weights = torch.ones(5)
    tree, tensors = pack({"server": weights, "pulled": {0: weights, 1: weights.clone()}})
    assert len(tensors) == 2
    weights.zero_()
    assert unpack(tree, tensors)["pulled"][0].sum() == 5


def test_anything_else_is_refused_when_it_is_packed():
    with pytest.raises(TypeError, match="plain values and tensors, got set"):
        pack({"a": {1, 2}})
