"""Real processes of train.py that are killed and launched again while the others train."""

from tests import helpers
from tests.helpers import end_ranks, free_port, rows, samples_by_epoch, slow, start_rank, wait_until

SAMPLES, EPOCHS = 120, 40
SETTINGS = {"sync": "asp", "train_samples": SAMPLES, "epochs": EPOCHS, "rounds_per_epoch": 2}
SETTINGS |= {"local_batch_sizes": (6, 6, 6), "worker_timeout": 60.0, "resume": "auto"}
SETTINGS |= {"checkpoint_every": 40, "eval_every": 40}
SETTINGS["slowdown"] = ("0:2", "1:2", "2:2")  # so that a job lasts for long enough


@slow
def test_a_worker_that_is_killed_is_launched_again_and_trains_to_the_end(tmp_path):
    folder, port = tmp_path / "run", free_port()
    flags = helpers.to_flags(folder, **SETTINGS)
    processes = [start_rank(flags, rank, 3, port) for rank in range(3)]
    wait_until((folder / "metrics.jsonl").exists, 90)
    wait_until(lambda: len(rows(folder, "round")) >= 6, 90, "rounds")
    processes[2].kill()
    wait_until(lambda: rows(folder, "lost"), 90, "the loss")
    processes[2] = start_rank(flags, 2, 3, port)
    said = end_ranks(processes, 180)
    trained, left_out = samples_by_epoch(folder, EPOCHS), rows(folder, "lost")
    assert max(trained) == trained[-1] == SAMPLES
    assert sum(trained) + sum(row["samples"] for row in left_out) == EPOCHS * SAMPLES
    (joined,) = rows(folder, "joined")
    begins = f"rank 2 has joined, its share begins in epoch {joined['epoch'] + 1}"
    assert begins in said
    assert begins in processes[2].stdout
    assert 2 in {row["worker"] for row in rows(folder, "round") if row["epoch"] == EPOCHS - 1}
    assert 1 < joined["epoch"] < EPOCHS
    summary = helpers.summary_of(folder)
    assert summary["samples_seen"] + summary.get("lost_samples", 0) == EPOCHS * SAMPLES
    assert summary["joined_workers"] == summary["lost_workers"] == [2]
