"""What users are promised of whole runs, seen in the images that they train on and in their files.

Nothing here looks inside: a rewrite of plans, resuming or the cluster has to keep these tests.
"""

import json
import os
import signal
import time
from collections import Counter, defaultdict
from hashlib import sha256
from itertools import chain

import pytest
import torch
from safetensors.torch import load_file

import train
from dbsl.config.image_settings import ImageConfig
from dbsl.data.dataset import load_data
from tests import helpers
from tests.helpers import fingerprint, read, rows, samples_by_epoch, short

N, SIDE, EPOCHS = 90, 16, 3
SETTINGS = {"train_samples": N, "resolutions": (SIDE,), "epochs": EPOCHS, "lr_milestones": ()}
SETTINGS |= {"augment": "none", "noise_scale": False, "checkpoint_every": 1, "worker_timeout": 30}
ROUNDS = {"large_batch_size": (4,), "rounds_per_epoch": 2}


def run(folder, **settings):
    return helpers.run(folder, **{**SETTINGS, **settings})


def start(folder, ranks, **settings):
    flags = helpers.to_flags(folder, **{**SETTINGS, **settings, "resume": "auto"})
    return helpers.start_ranks(flags, ranks)


def name_of(image):
    return sha256(image.float().contiguous().numpy().tobytes()).hexdigest()


@pytest.fixture(scope="module")
def numbers():
    """Return the numbers of the training images, by what they show."""
    data = load_data(ImageConfig("digits", train_samples=N, eval_samples=20))
    images, _ = read(data.train, data.transform(SIDE, "none", 0))
    found = {name_of(image): number for number, image in enumerate(images)}
    assert len(found) == N
    return found


@pytest.fixture
def trained(tmp_path, monkeypatch, numbers):
    """Return ``trained()``: the images of each epoch that were trained on since the last call.

    Also by processes that were forked, and killed: each step is on the disk before the next one.
    With ``by_rank`` the images of each process, by its rank. ``pause_s`` is added to each step.
    """
    loss_function, learning_rate, step = train.loss_function, train.learning_rate, []

    def noting_images(model, images, *rest):
        step.extend(numbers[name] for name in map(name_of, images) if name in numbers)
        return loss_function(model, images, *rest)

    def noting_epoch(moment, *rest):
        rank = os.environ.get("RANK", "0")
        with open(tmp_path / f"trained-{rank}-{os.getpid()}.jsonl", "a") as file:
            file.write(json.dumps([int(moment), step]) + "\n")
        step.clear()
        time.sleep(take.pause_s)
        return learning_rate(moment, *rest)

    def take(*, by_rank=False):
        ranks = defaultdict(lambda: [[] for _ in range(EPOCHS)])
        for path in tmp_path.glob("trained-*.jsonl"):
            for epoch, images in map(json.loads, path.read_text().splitlines()):
                ranks[int(path.name.split("-")[1])][epoch] += images
            path.unlink()
        return (
            ranks
            if by_rank
            else [[*chain(*of_all)] for of_all in zip(*ranks.values(), strict=True)]
        )

    take.pause_s = 0.0
    monkeypatch.setattr(train, "loss_function", noting_images)
    monkeypatch.setattr(train, "learning_rate", noting_epoch)
    return take


def check_each_once(phases, folder):
    """Check that each image was trained on once an epoch, by what was kept of a run's phases.

    A phase goes on where the one before was saved: it may train again on what was not saved.
    """
    for epoch in range(EPOCHS):
        missing = set(range(N))
        for phase in reversed(phases):
            most = max(Counter(phase[epoch]).values(), default=1)
            assert most == 1, f"an image came twice in epoch {epoch}"
            missing -= {*phase[epoch]}
        assert not missing, f"images never came in epoch {epoch}"
    assert samples_by_epoch(folder, EPOCHS) == [N] * EPOCHS
    places = Counter((r["worker"], r["epoch"], r["round"]) for r in rows(folder, "round"))
    assert max(places.values()) == 1, "a round's number came twice"
    assert helpers.summary_of(folder)["samples_seen"] == EPOCHS * N


def check_merged_once(before, after, folder):
    """Check that each image is in one round an epoch of those that were merged, and in no other.

    What a process trained on `before` it was stopped counts as far as its rounds were saved: they
    are those of metrics.jsonl that it has not trained `after` that.
    """
    for epoch in range(EPOCHS):
        images = []
        for worker in {*before, *after}:
            told = [
                r for r in rows(folder, "round") if (r["worker"], r["epoch"]) == (worker, epoch)
            ]
            later = after[worker][epoch]
            count = sum(row["samples"] for row in told) - len(later)
            assert 0 <= count <= len(before[worker][epoch])
            images += before[worker][epoch][:count] + later
        assert sorted(images) == [*range(N)], epoch
    assert helpers.summary_of(folder)["samples_seen"] == EPOCHS * N


SPLITS = {
    "three workers": (1, {"local_batch_sizes": (2, 9, 3), "workers": 3}),
    "micro-batches": (1, {"local_batch_sizes": (8, 6), "workers": 2, "micro_batch_size": (3,)}),
    "two processes": (2, {"local_batch_sizes": (11, 3)}),
    "three processes": (3, {"local_batch_sizes": (2, 5, 7)}),
}


SPLIT = {"sync": "step", "model": "test_vit", "augment": "paper", "epochs": 2, "lr": 0.01}
SPLIT |= {"mixed_precision": "no", "save_best": False}


@pytest.fixture(scope="module")
def joint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("joint") / "run"
    run(folder, **SPLIT, workers=1, local_batch_sizes=(14,))
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("name", short(SPLITS, "three workers", "two processes"))
def test_any_split_of_a_global_batch_gives_the_same_weights(tmp_path, joint, name):
    ranks, split = SPLITS[name]
    if ranks == 1:
        run(tmp_path / "split", **SPLIT, **split)
    else:
        helpers.end_ranks(start(tmp_path / "split", ranks, **SPLIT, **split))
    weights = load_file(tmp_path / "split/model.safetensors")
    for key, value in joint.items():
        torch.testing.assert_close(weights[key], value, rtol=0, atol=1e-5)


JOINT = {"sync": "step", "global_batch_size": 16}
SLOWED = {"balance": "dynamic:1", "slowdown": ("3:3.0",), "workers": 4}
CHANGES = {  # steps, or rounds of all workers, before each stop, and workers from then on
    "step": (JOINT | {"workers": 4}, ((2, 3), (2, 5), (4, 2))),
    "bsp": (ROUNDS | {"workers": 4}, ((1, 3), (3, 2))),
    "bsp, twice": (ROUNDS | {"rounds_per_epoch": 3, "workers": 4}, ((1, 3), (2, 2))),
    "bsp, uneven": (ROUNDS | {"local_batch_sizes": (3, 3, 4, 9), "workers": 4}, ((1, 2),)),
    "step, balanced": (JOINT | SLOWED | {"rounds_per_epoch": 3}, ((5, 3),)),
    "bsp, balanced": (ROUNDS | SLOWED | {"rounds_per_epoch": 3}, ((2, 3),)),
    "asp": (ROUNDS | {"sync": "asp", "workers": 4}, ((2, 2), (3, 3))),
    "ssp": (ROUNDS | {"sync": "ssp", "slowdown": ("0:1.5",), "workers": 3}, ((1, 4),)),
}


@pytest.mark.parametrize("mode", short(CHANGES, "step", "bsp", "bsp, balanced", "asp"))
def test_workers_that_come_and_go_train_on_each_image_once_an_epoch(tmp_path, trained, mode):
    settings, stops = CHANGES[mode]
    folder, phases, pushed = tmp_path / "run", [], []
    stopped = helpers.stopped_at_step if mode.startswith("step") else helpers.stopped_at_round
    for number, workers in stops:
        with stopped(number):
            run(folder, **settings)
        phases.append(trained())
        if not pushed:
            pushed = [row["samples"] for row in rows(folder, "round") if row["round"] == 0]
        settings = {**settings, "workers": workers, "slowdown": None, "local_batch_sizes": None}
        settings |= {"resume": str(folder)}
    run(folder, **settings)
    phases.append(trained())
    check_each_once(phases, folder)
    if mode.startswith("step"):  # what was saved is at the step
        assert sum(len(images) for phase in phases for images in phase) == EPOCHS * N
    elif mode.startswith("bsp"):  # at the start of the round that was under way, not the first
        first, *later = [phase[0] for phase in phases]
        first = {*first[: sum(pushed)]}
        assert len(first) > N / 4
        assert not first & set().union(*later)


def start_and_end(folder, ranks, step, rank, number, **settings):
    """Have a signal come to one process after so many of its steps; return all exit statuses."""

    def act():
        if os.environ["RANK"] == str(rank):
            if number == signal.SIGKILL and rank == 0:  # there is something to go on from
                whole = "checkpoints/*/manifest.json"
                helpers.wait_until(lambda: [*folder.glob(whole)], 30, "a checkpoint")
            os.kill(os.getpid(), number)

    with helpers.at_step(step, act):
        processes = start(folder, ranks, **settings)
    return helpers.wait_all(processes)


REAL = {
    "bsp": ROUNDS,
    "step": {"sync": "step"},
    "asp": ROUNDS | {"sync": "asp"},
    "ssp": ROUNDS | {"sync": "ssp"},
    "asp, gradients": {"sync": "asp", "push": "gradients"},
}
# How they meet, how many processes, and which of them is asked to stop.
ASKED = [("bsp", 2, 1), ("step", 2, 1), ("asp", 2, 1), ("bsp", 2, 0), ("step", 2, 0)]
ASKED += [("ssp", 2, 0), ("asp, gradients", 2, 1)]
ASKED += [(mode, 4, rank) for mode in ("bsp", "step", "asp") for rank in range(4)]


@pytest.mark.parametrize(("mode", "ranks", "asked"), short(ASKED, *ASKED[:3]))
def test_sigterm_in_any_process_ends_all_with_a_checkpoint_that_goes_on(
    tmp_path, trained, mode, ranks, asked
):
    folder, settings = tmp_path / "run", REAL[mode]
    if settings.get("sync") == "step" or "push" in settings:
        settings = settings | {"local_batch_sizes": (5, 3) if ranks == 2 else (2,) * ranks}
    # Processes tell each other once a second, and some take joint steps.
    trained.pause_s = 0.03 * ranks
    assert start_and_end(folder, ranks, 8, asked, signal.SIGTERM, **settings) == [75] * ranks
    before, trained.pause_s = trained(by_rank=True), 0.0
    assert not (folder / "summary.json").exists()
    shards = {path.stem for path in folder.glob("checkpoints/*/rank-*")}
    said = helpers.end_ranks(start(folder, ranks, **settings))
    assert "resumed from" in said
    after = trained(by_rank=True)
    alone = settings.get("sync") in ("asp", "ssp")  # the server's state
    assert shards == {f"rank-0000{rank}" for rank in range(1 if alone else ranks)}
    assert ("optimizer states begin empty" in said) == (alone and "push" not in settings)
    if alone:
        check_merged_once(before, after, folder)
    else:  # they have stopped at the same step
        for epoch in range(EPOCHS):
            images = [phase[rank][epoch] for phase in (before, after) for rank in range(ranks)]
            assert sorted(chain(*images)) == [*range(N)]
        helpers.end_ranks(start(tmp_path / "whole", ranks, **settings))
        assert fingerprint(folder) == fingerprint(tmp_path / "whole")


@pytest.mark.parametrize("sync", short(["asp", "ssp"], "ssp"))
def test_a_run_whose_server_was_killed_goes_on_and_takes_each_image_once(tmp_path, trained, sync):
    folder, settings = tmp_path / "run", ROUNDS | {"sync": sync, "checkpoint_every": "0.0001m"}
    statuses = start_and_end(folder, 2, 9, 0, signal.SIGKILL, **settings)
    assert statuses[0] == -signal.SIGKILL
    assert statuses[1] == 2 or sync == "asp"  # where the other one may have finished
    before = trained(by_rank=True)
    assert "resumed from" in helpers.end_ranks(start(folder, 2, **settings))
    check_merged_once(before, trained(by_rank=True), folder)


def test_without_a_lost_worker_the_others_take_each_image_once(tmp_path, trained):
    """What it had begun is counted as lost; its share of later epochs is the others'."""
    folder, settings = tmp_path / "run", ROUNDS | {"sync": "ssp", "staleness": 1}
    statuses = start_and_end(folder, 3, 6, 2, signal.SIGKILL, **settings)
    assert statuses == [0, 0, -signal.SIGKILL]
    epochs = trained()
    (lost,) = rows(folder, "lost")
    assert (lost["worker"], helpers.summary_of(folder)["lost_workers"]) == (2, [2])
    assert sum(samples_by_epoch(folder, EPOCHS)) + lost["samples"] == EPOCHS * N
    assert sorted(epochs[-1]) == [*range(N)]
    for images in epochs:  # those that were lost may come to the others, but not twice
        assert max(Counter(images).values()) == 1


BOUNDS = [("ssp", 0), ("ssp", 2), ("asp", 1)]


@pytest.mark.parametrize(("sync", "staleness"), short(BOUNDS, *BOUNDS[1:]))
def test_nobody_is_ahead_by_more_than_the_bound_and_staleness_counts_the_merges_since_the_pull(
    tmp_path, sync, staleness
):
    settings = ROUNDS | {"sync": sync, "staleness": staleness, "slowdown": ("0:6.0",)}
    run(tmp_path / "run", **settings, workers=3)
    clocks, pulled, leads = [0] * 3, [0] * 3, []
    for merges, row in enumerate(rows(tmp_path / "run", "round")):
        worker = row["worker"]
        leads.append(clocks[worker] - min(clocks))  # while it trained
        if sync == "asp":  # who waits for nobody pulls where it has pushed
            assert row["staleness"] == merges - pulled[worker]
        clocks[worker] += 1
        pulled[worker] = merges + 1
    assert clocks == [2 * EPOCHS] * 3
    assert max(leads) == staleness if sync == "ssp" else max(leads) > 2
