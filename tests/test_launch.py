import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState

import dbsl.launch
from dbsl.launch import computes_bf16, start_accelerator
from dbsl.lazy import lazy_import

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def fresh_accelerator():
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


@pytest.mark.parametrize(
    ("capabilities", "native"),
    [({"avx512_bf16": True}, True), ({"amx_bf16": True}, True), ({"avx512_f": True}, False)],
)
def test_a_cpu_that_only_converts_does_not_compute_bf16(monkeypatch, capabilities, native):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert computes_bf16(torch.device("cpu")) is native


@pytest.mark.parametrize(("native", "precision"), [(True, "bf16"), (False, "no")])
def test_auto_follows_the_device_and_anything_else_is_taken(monkeypatch, native, precision):
    monkeypatch.setattr(dbsl.launch, "computes_bf16", lambda device: native)
    assert start_accelerator("auto", 20.0).mixed_precision == precision
    for chosen in ("no", "bf16"):
        AcceleratorState._reset_state(True)
        assert start_accelerator(chosen, 20.0).mixed_precision == chosen


def rank_precision(rank):
    dbsl.launch.computes_bf16 = lambda device: rank != 1
    dbsl.launch.join_processes = lambda timeout_s: None
    state = PartialState(True)
    assert state.num_processes == 3
    return start_accelerator("auto", 20.0).mixed_precision


def test_one_process_without_native_bf16_decides_for_all(run_ranks, monkeypatch):
    for name, value in (("WORLD_SIZE", "3"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    assert run_ranks(rank_precision, world_size=3) == ["no"] * 3


def test_train_is_imported_without_what_is_slow_to_import():
    code = "import sys, train; print(*sys.modules)"
    command = [sys.executable, "-c", code]
    modules = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    slow = {"torchvision", "timm.models", "pandas", "matplotlib", "wandb", "torch._dynamo"}
    assert not slow & set(modules.split())


def test_a_lazy_module_runs_when_it_is_used_and_a_missing_one_is_named(tmp_path, monkeypatch):
    (tmp_path / "slow_one.py").write_text("import sys\nsys.slow_one_ran = True\nvalue = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    module = lazy_import("slow_one")
    inspect.getmodule(lambda: None)  # looks at all that is in sys.modules
    assert not hasattr(sys, "slow_one_ran")
    assert module.value == 3
    assert sys.slow_one_ran
    with pytest.raises(AttributeError, match="nothing"):
        module.nothing  # noqa: B018
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        lazy_import("no_such_module")
