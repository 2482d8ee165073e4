"""Real processes of train.py that are killed and launched again while the others train."""

import json

from dbsl.log.rows import read_metrics
from tests.helpers import free_port, slow, start_rank, to_flags, wait_all, wait_until

SAMPLES = 120
SETTINGS = {
    "train_samples": SAMPLES,
    "local_batch_sizes": (6, 6, 6),
    "rounds_per_epoch": 2,
    "worker_timeout": 60.0,
    "checkpoint_every": 40,
    "eval_every": 40,
    "resume": "auto",
    "slowdown": ("0:2", "1:2", "2:2"),  # so that a job lasts for long enough
}


class Job:
    """Three processes of a run."""

    def __init__(self, folder, epochs, **settings):
        self.folder, self.epochs, self._port = folder, epochs, free_port()
        self._flags = to_flags(folder, **SETTINGS, **settings, epochs=epochs)
        self.processes = [self.start(rank) for rank in range(3)]

    def start(self, rank):
        return start_rank(self._flags, rank, 3, self._port)

    def events(self, name):
        path = self.folder / "metrics.jsonl"
        return [e for e in read_metrics(path) if e["event"] == name] if path.exists() else []

    def wait_for(self, name, number=1):
        def over():
            return any(process.poll() not in (None, -9) for process in self.processes)

        wait_until(lambda: len(self.events(name)) >= number or over(), 90, name)
        assert not over(), [process.stderr for process in self.processes]

    def end(self):
        """Wait for the end; return samples trained on by epoch, and those counted as left out."""
        assert wait_all(self.processes, 180) == [0, 0, 0], [p.stderr for p in self.processes]
        trained = [0] * self.epochs
        for event in self.events("round"):
            trained[event["epoch"]] += event["samples"]
        return trained, sum(event["samples"] for event in self.events("lost"))


@slow
def test_a_worker_that_is_killed_is_launched_again_and_trains_to_the_end(tmp_path):
    job = Job(tmp_path / "run", 40, sync="asp")
    job.wait_for("round", 6)
    job.processes[2].kill()
    job.wait_for("lost")
    job.processes[2] = job.start(2)
    trained, left_out = job.end()
    assert max(trained) == trained[-1] == SAMPLES
    assert sum(trained) + left_out == 40 * SAMPLES
    (joined,) = job.events("joined")
    begins = f"rank 2 has joined, its share begins in epoch {joined['epoch'] + 1}"
    assert begins in job.processes[0].stdout
    assert begins in job.processes[2].stdout
    assert 2 in {e["worker"] for e in job.events("round") if e["epoch"] == 39}
    assert 1 < joined["epoch"] < 40
    summary = json.loads((job.folder / "summary.json").read_text())
    assert summary["samples_seen"] + summary.get("lost_samples", 0) == 40 * SAMPLES
    assert summary["joined_workers"] == summary["lost_workers"] == [2]
