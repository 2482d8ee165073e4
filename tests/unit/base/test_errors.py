"""Which errors say that another process was lost."""

import pytest
import torch.distributed as dist
import torch.utils.data.dataloader

from dbsl.base.errors import is_lost_peer

DATALOADER, GRAPH = torch.utils.data.dataloader.__file__, torch.autograd.graph.__file__


def raised_in(file, said, kind=RuntimeError):
    """Return an error that was raised in a file."""
    with pytest.raises(kind) as ended:
        exec(compile("raise kind(said)", file, "exec"), {"kind": kind, "said": said})
    return ended.value


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (raised_in(__file__, "[gloo/pair.cc:7] Timed out waiting 1000ms"), True),
        (raised_in(GRAPH, "Connection reset by peer"), True),
        (raised_in(__file__, "NCCL timeout", dist.DistBackendError), True),
        (raised_in(__file__, "[gloo/pair.cc:7] No route to host"), True),
        (raised_in(__file__, "the connection to the teacher timed out"), False),
        (raised_in(__file__, "[teacher:8080] timed out"), False),
        (raised_in(DATALOADER, "DataLoader timed out after 5 seconds"), False),
        (raised_in(__file__, "[c10d/socket.cpp:9] Broken pipe"), True),
        (raised_in(GRAPH, "40 MB are missing"), False),
        (raised_in(GRAPH, "Connection reset by peer", OSError), False),
    ],
)
def test_a_lost_peer_is_told_from_a_loops_own_error_with_such_words(error, lost):
    assert is_lost_peer(error) is lost
