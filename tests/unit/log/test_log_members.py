from dbsl.log.members import MemberLog
from dbsl.plan.turns import JoinedWorker, LostWorker, MissedRound, RoundReport


class Cluster:
    """What a cluster has to tell."""

    def __init__(self, membership=(), missed=()):
        self.membership, self.missed = (lambda rows=r: rows for r in (membership, missed))


def make():
    members, said = MemberLog(), []
    members.record(lambda event, row: None, said.append)
    return members, said


def came(members, worker, epoch):
    members.came(RoundReport(worker, epoch, 0, 8, 10, 10, 1, 1.0, 0.5, 1.0))


def missed(worker, *epochs):
    return [MissedRound(worker, epoch, 0, 10) for epoch in epochs]


def test_a_late_worker_is_told_of_when_it_falls_behind_and_when_it_is_back():
    members, said = make()
    for epoch in range(2, 30):
        came(members, 0, epoch)
        members.hear(Cluster(missed=missed(1, epoch)))
    assert said == [
        "warning: worker 1 is late; rounds go on without it, from round 1 of epoch 3 on"
    ]
    came(members, 1, 30)
    members.hear(Cluster())
    assert said[1:] == ["worker 1 is back in time: 28 rounds and 280 samples of it left out"]
    came(members, 1, 33)
    members.hear(Cluster(missed=missed(1, 31, 32)))  # heard of at once
    assert said[3:] == ["worker 1 is back in time: 2 rounds and 20 samples of it left out"]
    members.hear(Cluster(missed=missed(1, 34)))
    members.end()
    assert said[5:] == [
        "warning: worker 1 was late to the end: 1 round and 10 samples of it left out"
    ]
    assert members.missed_samples == 310


def test_lost_samples_and_workers_that_have_joined_are_in_the_summary_and_in_checkpoints():
    members, _ = make()
    loss = LostWorker(1, 1, 3, 833, "its process died")
    members.hear(Cluster([loss], missed(1, 2)))
    members.hear(Cluster([JoinedWorker(1, 1, 5, 5)]))
    state = members.state_dict()
    assert state == {
        "lost_workers": [1],
        "joined_workers": [1],
        "lost_samples": 833,
        "missed_samples": 10,
    }
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
