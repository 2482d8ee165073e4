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
def stand_ins(tmp_path, monkeypatch):
    """Return the file that the stand-ins write to."""
    for name, text in (("python", PROCESS), ("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SAID", str(tmp_path / "said"))
    return tmp_path / "said"


def sbatch(monkeypatch, nodes, tasks_per_node, statuses):
    """Run the batch script with flags, and return its exit status."""
    for name, value in {
        **{"NODES": nodes, "SLURM_STEP_TASKS_PER_NODE": tasks_per_node, "STATUSES": statuses},
        **{"SLURM_STEP_NUM_TASKS": len(statuses.split()), "SLURM_JOB_NODELIST": "n[1-2]"},
        "SLURM_JOB_ID": 47,
    }.items():
        monkeypatch.setenv(name, str(value))
    command = ["bash", str(ROOT / "examples/clusters/slurm.sbatch"), "--output-dir", "runs/a b"]
    return subprocess.run(command, capture_output=True).returncode


@pytest.mark.parametrize(
    ("nodes", "written", "local"),
    [("3 1", "3,1", [3, 3, 3, 1]), ("2 2 1", "2(x2),1", [2, 2, 2, 2, 1]), ("1", "1", [1])],
)
def test_the_slurm_job_tells_each_process_its_place_on_unlike_nodes(
    stand_ins, monkeypatch, nodes, written, local
):
    assert sbatch(monkeypatch, nodes, written, " ".join("0" for _ in local)) == 0
    rows = [line.split(" ", 6) for line in stand_ins.read_text().splitlines()]
    assert [int(row[0]) for row in rows] == list(range(len(local)))
    assert {row[1] for row in rows} == {str(len(local))}
    places = [i for size in map(int, nodes.split()) for i in range(size)]
    assert [int(row[2]) for row in rows] == places
    assert [int(row[3]) for row in rows] == local
    assert {tuple(row[4:6]) for row in rows} == {("first", "20047")}
    assert {row[6] for row in rows} == {"train.py --resume auto --output-dir runs/a b"}


@pytest.mark.parametrize(
    ("statuses", "again"),
    [
        *(("75 143 75 75", True), ("75 2 2 2", True), ("0 0 0 0", False)),
        *(("2 2 137 2", False), ("3 3 3 3", False), ("1 0 0 0", False)),
    ],
)
def test_the_slurm_job_is_queued_again_only_if_it_was_stopped(
    stand_ins, monkeypatch, statuses, again
):
    status = sbatch(monkeypatch, "3 1", "3,1", statuses)
    assert status == max(map(int, statuses.split()))
    said = stand_ins.with_name("said.scontrol")
    assert said.exists() == again
    if again:
        assert said.read_text() == "requeue 47\n"


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
def test_the_skypilot_task_ends_with_the_status_of_train_py(
    stand_ins, monkeypatch, statuses, status
):
    task = yaml.safe_load((ROOT / "examples/clusters/skypilot.yaml").read_text())
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]
    for name, value in {
        **{"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NODE_RANK": "1"},
        **{"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "2", "STATUSES": statuses},
        **task["envs"],
    }.items():
        monkeypatch.setenv(name, value)
    assert subprocess.run(["bash", "-c", task["run"]]).returncode == status
    told = sorted(line.split(" ", 6)[:6] for line in stand_ins.read_text().splitlines())
    where = ["10.0.0.1", "29500"]
    assert told == [["2", "4", "0", "2", *where], ["3", "4", "1", "2", *where]]
