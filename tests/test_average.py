import json
from contextlib import suppress

import pytest
import torch
from accelerate.state import AcceleratorState

import train
from dbsl.average import WeightAverage
from dbsl.model import load_model
from dbsl.weights import FlatWeights


def test_average_is_exponential_and_starts_at_the_first_weights():
    average = WeightAverage(0.75)
    for value in (4.0, 8.0, 0.0):
        average.add(torch.full((2,), value))
    assert average.vector.tolist() == [3.75, 3.75]  # 0.75 * (0.75 * 4 + 0.25 * 8) + 0.25 * 0
    again = WeightAverage(0.75)
    again.load_state_dict(average.state_dict(), torch.device("cpu"))
    again.add(torch.zeros(2))
    assert again.vector.tolist() == pytest.approx([2.8125, 2.8125])


def test_the_model_has_the_average_for_a_while_only():
    weights = FlatWeights(torch.nn.Linear(2, 1))
    average = WeightAverage(0.5)
    average.add(torch.zeros_like(weights.vector))
    before = weights.vector.clone()
    with suppress(RuntimeError), average.inside(weights):
        assert not weights.vector.any()
        raise RuntimeError
    assert torch.equal(weights.vector, before)


def test_averaged_weights_are_evaluated_beside_the_raw_and_change_no_bit_of_them(tmp_path):
    settings = {
        "model": "test_resnet",
        "resolutions": (16,),
        "train_samples": 200,
        "eval_samples": 60,
        "epochs": 4,
        "eval_every": 2,
        "large_batch_size": (8,),
        "slope": (0.001,),
        "intercept": (0.01,),
        "mixed_precision": "no",
        "report_to": "none",
    }
    events = {}
    for name, decay in (("raw", 0.0), ("both", 0.5)):
        AcceleratorState._reset_state(True)
        train.main(train.Config(**settings, ema_decay=decay, output_dir=str(tmp_path / name)))
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        events[name] = [e for e in map(json.loads, lines) if e["event"] == "eval"]
    AcceleratorState._reset_state(True)
    assert [e["loss"] for e in events["raw"]] == [e["loss"] for e in events["both"]]
    raw, averaged = load_model(tmp_path / "both"), load_model(tmp_path / "both", ema=True)
    assert not (tmp_path / "raw/model_ema.safetensors").exists()
    weights = (tmp_path / name / "model.safetensors" for name in ("raw", "both"))
    assert next(weights).read_bytes() == next(weights).read_bytes()
    pairs = zip(raw.parameters(), averaged.parameters(), strict=True)
    assert any(not torch.equal(one, other) for one, other in pairs)
    last = events["both"][-1]
    assert last["ema_loss"] != last["loss"]
    summary = json.loads((tmp_path / "both/summary.json").read_text())
    assert summary["final_ema_accuracy"] == last["ema_accuracy"]
    assert "final_ema_accuracy" not in json.loads((tmp_path / "raw/summary.json").read_text())
