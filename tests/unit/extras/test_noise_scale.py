import json

import pytest

from tests import helpers
from tests.helpers import TINY, slow

SETTINGS = TINY | {
    "train_samples": 240,
    "eval_samples": 40,
    "epochs": 4,
    "intercept": (0.0001,),
    "lr": 0.01,
    "dropout": (0.1,),
    "mixed_precision": "no",
    "checkpoint_every": 0,
}


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(folder, **changes):
    helpers.run(folder, **(SETTINGS | changes))
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return (folder / "model.safetensors").read_bytes(), records


MODES = {
    "dual batch": {
        "rounds_per_epoch": 2,
        "small_workers": 2,
        "small_batch_size": (4,),
        "large_batch_size": (16,),
    },
    "asp": {
        "sync": "asp",
        "rounds_per_epoch": 2,
        "small_workers": 2,
        "small_batch_size": (4,),
        "large_batch_size": (16,),
    },
    "equal batches": {"local_batch_sizes": (4, 4, 4, 4)},
    "one worker": {"workers": 1, "local_batch_sizes": (8,)},
    "step": {"sync": "step", "local_batch_sizes": (4, 8, 8, 12), "epochs": 20},
    "push": {"push": "gradients", "local_batch_sizes": (8, 8, 8, 8)},
}


SHORT = ("dual batch", "asp")


@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=[slow] * (mode not in SHORT)) for mode in MODES]
)
def test_noise_is_measured_and_changes_no_bit(mode, tmp_path):
    with_noise, records = run(tmp_path / "with", **MODES[mode])
    without, silent = run(tmp_path / "without", noise_scale=False, **MODES[mode])
    assert with_noise == without
    noise = [row for row in records if row["event"] == "noise"]
    assert noise, "no estimate in the whole run"
    assert {"epoch", "resolution", "b_simple", "low", "high", "pairs"} <= noise[-1].keys()
    summary = json.loads((tmp_path / "with/summary.json").read_text())
    found = [summary[name] for name in ("noise_scale", "noise_scale_low", "noise_scale_high")]
    assert found == [noise[-1][name] for name in ("b_simple", "low", "high")]
    assert not [row for row in silent if row["event"] == "noise"]
    assert "noise_scale" not in json.loads((tmp_path / "without/summary.json").read_text())
    measured = [row for row in records if row["event"] == "round" and "gradient_batch" in row]
    sizes = {row["gradient_batch"] for row in measured}
    micro = {row.get("micro_batch") for row in measured}
    if mode in ("dual batch", "equal batches", "push"):  # all at the same weights
        assert max(sizes) == {"dual batch": 36, "equal batches": 16, "push": 30}[mode]
        assert noise[-1]["pairs"] == {"dual batch": 8, "equal batches": 4, "push": 32}[mode]
    else:
        found = {"step": (30, {3}), "one worker": (8, {2}), "asp": (15, {2, 4})}
        assert (max(sizes), micro) == found[mode]
