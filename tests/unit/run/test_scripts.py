"""What examples/clusters does for Slurm, Kubernetes and SkyPilot, without any of them."""

import os
import subprocess

import pytest
import yaml

from tests.helpers import ROOT

# Stands in for python: says what it was told, and ends as it is told.
PROCESS = """#!/bin/bash
echo "$RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT $*" >> "$SAID"
read -ra statuses <<< "$STATUSES"
exit "${statuses[RANK]}"
"""
# Starts the tasks as Slurm would, says how they end, and ends with the highest status.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do echo "$1" >> "$SAID.srun"; shift; done
worst=0 rank=0 node=0
for size in $NODES; do
    for ((i = 0; i < size; i++)); do
        SLURM_PROCID=$rank SLURM_LOCALID=$i SLURM_NODEID=$node "$@"
        status=$?
        ((status > worst)) && worst=$status
        ((status)) && echo "srun: error: n1: task $rank: Exited with exit code $status" >&2
        ((rank++))
    done
    ((node++))
done
exit $worst
"""
SCONTROL = """#!/bin/bash
if [[ $1 == show ]]; then printf 'first\\nsecond\\n'; else echo "$@" >> "$SAID.scontrol"; fi
"""


@pytest.fixture
def play(tmp_path, monkeypatch):
    """Return ``play(*command, **environment)``: its status, and what each python was told."""
    for name, text in (("python", PROCESS), ("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def run(*command, **environment):
        path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
        environment |= {"PATH": path, "SAID": tmp_path / "said"}
        for name, value in environment.items():
            monkeypatch.setenv(name, str(value))
        status = subprocess.run(["bash", *command], capture_output=True).returncode
        rows = [line.split(" ", 6) for line in (tmp_path / "said").read_text().splitlines()]
        return status, rows

    return run


def sbatch(play, nodes, written, statuses):
    """Run the batch script with flags."""
    job = {"NODES": nodes, "SLURM_STEP_TASKS_PER_NODE": written, "STATUSES": statuses}
    job |= {"SLURM_STEP_NUM_TASKS": len(statuses.split()), "SLURM_JOB_NODELIST": "n[1-2]"}
    script = str(ROOT / "examples/clusters/slurm.sbatch")
    return play(script, "--output-dir", "runs/a b", SLURM_JOB_ID=47, **job)


@pytest.mark.parametrize(
    ("nodes", "written", "local"),
    [("3 1", "3,1", [3, 3, 3, 1]), ("2 2 1", "2(x2),1", [2, 2, 2, 2, 1]), ("1", "1", [1])],
)
def test_the_slurm_job_tells_each_process_its_place_on_unlike_nodes(play, nodes, written, local):
    status, rows = sbatch(play, nodes, written, " ".join("0" for _ in local))
    assert status == 0
    places = [i for size in map(int, nodes.split()) for i in range(size)]
    own = zip(range(len(local)), places, local, strict=True)
    where = ["first", "20047", "train.py --resume auto --output-dir runs/a b"]
    assert rows == [[*map(str, (n, len(local), place, size)), *where] for n, place, size in own]


@pytest.mark.parametrize(
    ("statuses", "again"),
    [
        *(("75 143 75 75", True), ("75 2 2 2", True), ("0 0 0 0", False)),
        *(("2 2 137 2", False), ("3 3 3 3", False), ("1 0 0 0", False)),
    ],
)
def test_the_slurm_job_is_queued_again_only_if_it_was_stopped(play, tmp_path, statuses, again):
    status, _ = sbatch(play, "3 1", "3,1", statuses)
    assert status == max(map(int, statuses.split()))
    said = tmp_path / "said.scontrol"
    assert [path.read_text() for path in (said,) if path.exists()] == ["requeue 47\n"] * again


def test_the_slurm_job_is_warned_by_the_signal_that_train_py_saves_at():
    text = (ROOT / "examples/clusters/slurm.sbatch").read_text()
    assert "#SBATCH --signal=TERM@" in text
    assert "#SBATCH --requeue" in text
    assert "\ntrap " not in text  # scancel must end the script, too: it is not to be queued again


def test_the_kubernetes_job_runs_train_py_with_as_many_pods_as_processes():
    service, job = yaml.safe_load_all((ROOT / "examples/clusters/kubernetes.yaml").read_text())
    spec = job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    given = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert spec["completions"] == spec["parallelism"] == int(given["WORLD_SIZE"])
    assert given["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert pod["subdomain"] == service["metadata"]["name"]
    claims = {v["name"] for v in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == claims
    rules = {
        tuple(rule["onExitCodes"]["values"]): rule["action"]
        for rule in spec["podFailurePolicy"]["rules"]
        if "onExitCodes" in rule
    }
    assert rules == {(75, 143): "Ignore", (3,): "FailJob"}
    assert pod["restartPolicy"] == "Never"  # podFailurePolicy is refused beside another


@pytest.mark.parametrize(
    ("statuses", "status"),
    [("0 0 0 0", 0), ("75 75 75 75", 75), ("0 0 137 75", 75), ("2 2 137 2", 137)],
)
def test_the_skypilot_task_ends_with_the_status_of_train_py(play, statuses, status):
    task = yaml.safe_load((ROOT / "examples/clusters/skypilot.yaml").read_text())
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]
    node = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NODE_RANK": 1}
    node |= {"SKYPILOT_NUM_NODES": 2, "SKYPILOT_NUM_GPUS_PER_NODE": 2, "STATUSES": statuses}
    ended, rows = play("-c", task["run"], **node, **task["envs"])
    assert ended == status
    where = ["10.0.0.1", "29500"]
    told = sorted(row[:6] for row in rows)
    assert told == [["2", "4", "0", "2", *where], ["3", "4", "1", "2", *where]]
