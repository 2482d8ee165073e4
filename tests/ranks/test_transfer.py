import pytest
import torch
import torch.distributed as dist

import dbsl.cluster.wire
from dbsl.cluster.wire import Transfer


def exchange(rank, dtype, length, poisoned):
    dbsl.cluster.wire.CHUNK = 1000  # several, of which the last is shorter
    pair = dist.new_group([0, 1], backend="gloo")
    vector = torch.linspace(-1, 1, length) * (rank + 1)
    if rank == 1:
        if poisoned:
            vector[length // 2] = float("nan")
        transfer = Transfer(vector, pair, dtype)
        transfer.send(vector)
        transfer.wait()
        transfer.receive(vector)
        return vector.tolist()
    received = torch.zeros(length)
    transfer = Transfer(received, pair, dtype)
    finite = transfer.receive(received, check=True)
    transfer.send(received)
    transfer.wait()
    return received.tolist(), finite


@pytest.mark.parametrize("length", [7, 3500])
@pytest.mark.parametrize(("dtype", "error"), [(None, 0.0), (torch.bfloat16, 2**-8)])
def test_vectors_come_as_they_are_or_rounded_to_what_travels(run_ranks, length, dtype, error):
    (there, finite), back = run_ranks(exchange, dtype, length, False)
    sent, there = torch.linspace(-1, 1, length) * 2, torch.tensor(there)
    assert finite
    assert (there - sent).abs().max() <= error * 2
    assert error == 0.0 or not torch.equal(there, sent)
    assert back == there.tolist()


def test_a_vector_that_is_not_finite_is_told_of_when_asked(run_ranks):
    (_, finite), _ = run_ranks(exchange, None, 3500, True)
    assert not finite
