from dbsl.log.lines import MemberLog
from dbsl.plan.types import JoinedWorker, LostWorker


class Cluster:
    """What a cluster has to tell."""

    def __init__(self, membership):
        self.membership = lambda: membership


def make():
    members, said = MemberLog(), []
    members.record(lambda event, row: None, said.append)
    return members, said


def test_lost_samples_and_workers_that_have_joined_are_in_the_summary_and_in_checkpoints():
    members, _ = make()
    loss = LostWorker(1, 1, 3, 833, "its process died")
    members.hear(Cluster([loss]))
    members.hear(Cluster([JoinedWorker(1, 1, 5, 5)]))
    state = members.state_dict()
    assert state == {"lost_workers": [1], "joined_workers": [1], "lost_samples": 833}
    again = MemberLog()
    again.load_state_dict(state)
    assert again.state_dict() == state


def test_a_worker_that_is_lost_joins_and_is_lost_between_two_looks_is_recorded_in_order():
    members, said = make()
    events = []
    members.record(lambda event, row: events.append(event), said.append)
    loss, again = LostWorker(1, 1, 3, 7, "its process died"), JoinedWorker(1, 1, 5, 5)
    members.hear(Cluster([loss, again, loss]))
    assert events == ["lost", "joined", "lost"]
    assert (members.lost, members.joined, members.lost_samples) == ([1, 1], [1], 14)
    assert ["was lost" in line for line in said] == [True, False, True]
