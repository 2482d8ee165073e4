from dbsl.run.stopping import Stopwatch


def test_start_up_is_in_the_total_and_not_in_the_training_over_two_sessions(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    first = Stopwatch()
    now[0] += 12
    assert first.start_training() == 12
    now[0] += 30
    with first.evaluating():
        now[0] += 5
    saved = first.state_dict()

    now[0] += 1000  # nothing ran
    second = Stopwatch()
    now[0] += 2
    second.load_state_dict(saved)
    now[0] += 1
    second.start_training()
    now[0] += 10
    assert second.start_up_s == 12 + 3
    assert second.train_s(now[0], without_evaluation=True) == 30 + 10
    assert second.train_s(now[0], without_evaluation=False) == 30 + 5 + 10
    assert second.total_s == 12 + 35 + 3 + 10
