import json

import pytest

from dbsl.extras.emulate import Link
from tests.helpers import run

MODES = {
    "bsp": {"rounds_per_epoch": 2},
    "bsp, delta": {"merge": "delta"},
    "bsp, gradients": {"push": "gradients"},
    "ssp": {"sync": "ssp"},
    "asp": {"sync": "asp"},
    "step": {"sync": "step"},
}
SETTINGS = {"workers": 2, "epochs": 2, "large_batch_size": (10,), "log_every": 0}


def outcome(folder):
    """Weights, virtual seconds, and each worker's compute and wait time."""
    model = (folder / "model.safetensors").read_bytes()
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    time_s = [row["virtual_time_s"] for row in rows if row["event"] == "eval"][-1]
    rounds = [row for row in rows if row["event"] == "round"]
    compute = sum(row["compute_time_s"] for row in rounds)
    return model, time_s, compute, sum(row["wait_time_s"] for row in rounds)


@pytest.mark.parametrize("mode", list(MODES))
def test_a_link_takes_virtual_time_that_counts_as_waiting_and_no_weights_change(tmp_path, mode):
    how = {
        k: v
        for k, v in SETTINGS.items()
        if k != "large_batch_size" or "global" not in str(MODES[mode])
    }
    run(tmp_path / "free", **how, **MODES[mode])
    run(tmp_path / "link", **how, **MODES[mode], link_gbps=0.01, link_ms=1.0)
    model, free_s, compute_s, waited_s = outcome(tmp_path / "free")
    same, link_s, same_s, more_s = outcome(tmp_path / "link")
    assert compute_s == pytest.approx(same_s)
    assert link_s > free_s + 0.5
    assert more_s > waited_s
    if mode not in ("ssp", "asp"):  # where the order of the workers follows from times
        assert model == same


def test_virtual_time_is_the_computing_and_the_formula_of_the_link(tmp_path):
    for name, extra in (("free", {}), ("link", {"link_gbps": 0.1, "link_ms": 2.0})):
        run(tmp_path / name, **SETTINGS, rounds_per_epoch=3, **extra)
    numbers = sum(t.numel() for t in _state(tmp_path / "link") if t.is_floating_point())
    cost = Link(0.1, 2.0).barrier_s(4 * numbers, 2, at_server=False)
    rounds = SETTINGS["epochs"] * 3
    free_s, link_s = (outcome(tmp_path / name)[1] for name in ("free", "link"))
    assert link_s - free_s == pytest.approx(rounds * cost, rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"link_ms": 1.0}, "link_ms must be 0.0 except with link_gbps, got 1.0"),
        (
            {"link_gbps": 1.0, "link_overlap": 0.5},
            "link_overlap must be 0.0 except with link_gbps and",
        ),
        ({"link_gbps": 0.0}, "link_gbps must be"),
        ({"link_overlap": 1.5, "link_gbps": 1.0, "sync": "step"}, "link_overlap must be"),
    ],
)
def test_a_link_out_of_place_is_refused(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()


def _state(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors").values()
