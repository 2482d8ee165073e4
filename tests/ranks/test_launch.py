import inspect
import os
import re
import signal
import subprocess
import sys
import time
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_simple_launcher_cmd_env
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import dbsl.base.errors
import dbsl.cluster.launch
import dbsl.run.accelerator
from dbsl.base import machine
from dbsl.base.errors import EXIT_INTERRUPTED, SyncError, one_line_errors
from dbsl.base.machine import lazy_import, remember
from dbsl.cluster.launch import chosen_backend, prepare_group
from dbsl.config.parse import parse_config
from dbsl.run.accelerator import check_launcher, common_threads, first_on_node, start_accelerator
from tests.helpers import ROOT, Forked, free_port, run, start_ranks, to_flags, wait_all
from train import Config

# With the handler that a terminal's process has; that of a background job is ignored.
RUN_TRAIN = """
import runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, sys.argv.pop())
runpy.run_path("train.py", run_name="__main__")
"""


NOWHERE = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.fixture
def environ(monkeypatch):
    """Return ``environ(NAME=value, ...)``, which sets variables, or with None takes them away."""

    def change(**values):
        for name, value in values.items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, str(value))

    return change


@pytest.mark.parametrize("capability", ["avx512_bf16", "amx_bf16", "avx512_f"])
def test_a_cpu_that_only_converts_does_not_compute_bf16(monkeypatch, capability):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {capability: True})
    native = dbsl.run.accelerator.computes_bf16(torch.device("cpu"))
    assert native is (capability != "avx512_f")


@pytest.mark.parametrize(
    ("native", "launched", "chosen", "precision"),
    [
        (True, None, "auto", "bf16"),
        (False, None, "auto", "no"),
        (False, None, "bf16", "bf16"),
        (False, "bf16", "auto", "bf16"),  # what the launcher was asked for
        (False, "bf16", "no", "no"),  # a flag wins
        (True, "no", "auto", "bf16"),  # the launcher's own default, too
    ],
)
def test_auto_follows_the_launcher_then_the_device_and_anything_else_is_taken(
    monkeypatch, environ, native, launched, chosen, precision
):
    monkeypatch.setattr(dbsl.run.accelerator, "computes_bf16", lambda device: native)
    environ(ACCELERATE_MIXED_PRECISION=launched)
    assert start_accelerator(chosen, 20.0).mixed_precision == precision


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("ACCELERATE_MIXED_PRECISION", "fp8", "fp8 .*use bf16 or fp16"),
        ("ACCELERATE_USE_FSDP", "true", "FSDP .*--micro-batch-size"),
        ("ACCELERATE_USE_DEEPSPEED", "true", "DeepSpeed .*--micro-batch-size"),
        ("ACCELERATE_USE_MEGATRON_LM", "true", "Megatron-LM .*--micro-batch-size"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "true", "parallelism .*--micro-batch-size"),
        ("ACCELERATE_IN_TPU_POD", "1", "TPUs .*a worker is a process on a GPU or a CPU"),
        ("PJRT_DEVICE", "TPU", "TPUs .*a worker is a process on a GPU or a CPU"),
        ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR", "torch.compile .*use --compile"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4", "4 gradient .*--micro-batch-size"),
    ],
)
def test_what_the_launcher_was_asked_for_in_vain_is_refused_before_anything_is_written(
    monkeypatch, tmp_path, name, value, words
):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"accelerate launch must not ask for .*{words}") as error:
        run(tmp_path / "run")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("count", [1, 2])
def test_what_accelerate_launch_sets_by_itself_is_not_refused_and_tells_of_others(environ, count):
    arguments = ["--cpu", "--num_processes", str(count), "train.py"]
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(arguments))
    _, environment = prepare_simple_launcher_cmd_env(arguments)
    assert "ACCELERATE_MIXED_PRECISION" in environment
    assert ("MASTER_ADDR" in environment) == (count == 2)
    environ(**environment)
    check_launcher()
    environ(ACCELERATE_GRADIENT_ACCUMULATION_STEPS=1)
    check_launcher()


ACCELERATE, HOST = {"ACCELERATE_MIXED_PRECISION": "no"}, {"MASTER_ADDR": "127.0.0.1"}


@pytest.mark.parametrize(
    ("environment", "warning"),
    [
        ({"SLURM_NTASKS": 4, "SLURM_PROCID": 0}, "Slurm has 4 tasks, and each that runs train.py"),
        ({"SLURM_NTASKS": 4, "SLURM_PROCID": 1}, None),  # the first says it for all
        ({"SLURM_NTASKS": 1, "SLURM_PROCID": 0}, None),
        ({"SLURM_NTASKS": 4, "RANK": 0, "WORLD_SIZE": 1}, None),
        ({}, None),
        (ACCELERATE, None),
        (ACCELERATE | HOST, "--multi_gpu --num_processes 2"),
        (HOST, None),  # somebody else's
    ],
)
def test_one_process_where_several_were_asked_for_is_said(environ, capsys, environment, warning):
    environ(**dict.fromkeys([*ACCELERATE, *HOST, "WORLD_SIZE"]) | environment)
    start_accelerator("no", 20.0)
    error = capsys.readouterr().err
    assert (warning or "") in error
    assert error.count("\n") == (warning is not None)


def test_a_launch_in_another_precision_drops_what_a_run_found_in_its_own(monkeypatch, tmp_path):
    found = "found:\n  processes: 1\n  mixed_precision: 'no'\n  slope: [0.1]\n  workers: 4\n"
    (tmp_path / "c.yaml").write_text(found)
    flags = ["--config", str(tmp_path / "c.yaml")]
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    assert parse_config(Config, flags).found["mixed_precision"] == "no"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    assert parse_config(Config, flags).found == {}


def test_float32_on_cuda_says_what_runs_in_tf32(monkeypatch):
    def described(device, precision="no"):
        own = SimpleNamespace(device=torch.device(device), mixed_precision=precision)
        return dbsl.run.accelerator.describe_precision(own)

    assert described("cuda") == "no (convolutions in TF32, matrix products in float32)"
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert described("cuda") == "no (convolutions in float32, matrix products in float32)"
    torch.backends.cuda.matmul.fp32_precision = "tf32"  # as a script may
    try:
        assert described("cuda") == "no (convolutions in float32, matrix products in TF32)"
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"
    assert (described("cpu"), described("cuda", "bf16")) == ("no", "bf16")


def rank_on_node(rank, threads, local_ranks):
    """Return the nodes, and the threads of this process and of all, as a launcher leaves them."""
    os.environ |= {"LOCAL_RANK": str(local_ranks[rank]), "LOCAL_WORLD_SIZE": "1"}
    os.environ.pop("OMP_NUM_THREADS", None)
    dbsl.run.accelerator.computes_bf16 = lambda device: rank != 1
    torch.set_num_threads(threads[rank])
    accelerator = start_accelerator("auto", 20.0)
    assert accelerator.mixed_precision == "no"  # one process decides for all
    nodes = dbsl.run.accelerator.nodes_of(accelerator)
    return nodes, torch.get_num_threads(), common_threads(accelerator)


@pytest.mark.parametrize(("threads", "common"), [((3, 3, 5), None), ((3, 3, 3), 3)])
def test_processes_share_a_precision_keep_their_threads_and_know_their_nodes(
    run_ranks, environ, threads, common
):
    environ(**NOWHERE)
    found = run_ranks(rank_on_node, threads, (0, 1, 0), world_size=3)
    assert found == [((0, 0, 1), own, common) for own in threads]


def test_a_launch_for_the_cpu_leaves_the_gpu_alone(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")  # accelerate launch --cpu
    joined, starting = [], dbsl.run.accelerator
    monkeypatch.setattr(starting, "prepare_group", lambda timeout_s, cpu: joined.append(cpu))
    assert start_accelerator("auto", 20.0).device.type == "cpu"
    assert joined == [True]


def test_nothing_is_asked_of_a_store_that_no_launcher_serves(environ):
    environ(**NOWHERE, TORCHELASTIC_RUN_ID=None)  # srun's: connecting would wait 20 s, and fail
    assert remember("run folder", "runs/x") == "runs/x"


def test_train_is_imported_without_what_is_slow_to_import():
    code = "import sys, train; print(*sys.modules)"
    command = [sys.executable, "-c", code]
    modules = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    slow = {"torchvision", "timm.models", "pandas", "matplotlib", "wandb", "torch._dynamo"}
    assert not slow & set(modules.split())


def test_ctrl_c_during_the_imports_ends_quietly(tmp_path):
    code = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(20)\n"
    (tmp_path / "torch.py").write_text(code)
    command = [sys.executable, "-c", RUN_TRAIN, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (EXIT_INTERRUPTED, "", "")


@pytest.mark.parametrize("before", [signal.default_int_handler, signal.SIG_IGN])
def test_after_the_imports_ctrl_c_is_what_it_was_before_them(before):
    usual = signal.signal(signal.SIGINT, before)
    try:
        dbsl.base.errors.quiet_interrupts()
        assert (signal.getsignal(signal.SIGINT) is before) == (before == signal.SIG_IGN)
        with one_line_errors():
            assert signal.getsignal(signal.SIGINT) is before
    finally:
        signal.signal(signal.SIGINT, usual)


def test_a_lazy_module_runs_when_it_is_used_and_a_missing_one_is_named(tmp_path, monkeypatch):
    (tmp_path / "slow_one.py").write_text("import sys\nsys.slow_one_ran = True\nvalue = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(machine, "_LAZY", [])
    module = lazy_import("slow_one")
    inspect.getmodule(lambda: None)  # looks at all that is in sys.modules
    assert not hasattr(sys, "slow_one_ran")
    assert module.value == 3
    assert sys.slow_one_ran
    with pytest.raises(AttributeError, match="nothing"):
        module.nothing  # noqa: B018
    missing = lazy_import("no_such_module")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        missing.value  # noqa: B018
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        machine.check_installed()


@pytest.mark.parametrize("variable", ["TORCHELASTIC_ERROR_FILE", "ACCELERATE_MIXED_PRECISION"])
def test_under_a_launcher_the_line_that_counts_is_said_and_kept(
    tmp_path, monkeypatch, capsys, variable
):
    monkeypatch.setenv(variable, str(tmp_path / "error.json"))
    with pytest.raises(SystemExit), one_line_errors():
        parse_config(Config, ["--resume", "nowhere"])
    line, hint = capsys.readouterr().err.splitlines()
    assert line.startswith("error: resume must be auto")
    assert "the line above is the reason" in hint
    if variable == "TORCHELASTIC_ERROR_FILE":  # as torchrun reads it
        failure = ProcessFailure(0, 7, 2, str(tmp_path / "error.json"))
        assert line in ChildFailedError("train.py", {0: failure}).format_msg()


def failing(error):
    dbsl.base.errors.one_of_several = lambda: True  # in a fork
    raise error


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [(KeyError("bug"), 1, "KeyError: 'bug'\n"), (SyncError("gone"), 2, "error: gone\n")],
)
def test_torchrun_has_the_traceback_of_a_bug_and_the_line_of_what_is_known(
    tmp_path, error, status, said
):
    kept = tmp_path / "error.json"
    process = Forked(lambda: failing(error), RANK="1", TORCHELASTIC_ERROR_FILE=str(kept))
    assert process.wait() == status
    assert said in process.stderr
    report = ChildFailedError("train.py", {0: ProcessFailure(0, 7, status, str(kept))}).format_msg()
    assert said.strip() in report
    assert ("Traceback" in process.stderr) == ("in failing" in report) == (status == 1)


LATE = r"error: not all processes have met within 1\.5 s \(--worker-timeout\): "


@pytest.mark.parametrize(
    ("ranks", "status", "said"),
    [((0, 1, 2), 0, ""), ((0, 1), 2, f"{LATE}.*2/3 clients"), ((2,), 2, f"{LATE}.*127.0.0.1, ")],
)
def test_processes_that_do_not_come_are_told_of_in_one_line(ranks, status, said):
    timeout_s, port = (1.5 if said else 60.0), str(free_port())
    where = NOWHERE | {"MASTER_PORT": port, "LOCAL_WORLD_SIZE": "3"}
    started = [
        Forked(partial(start_accelerator, "no", timeout_s), **where, RANK=str(r), LOCAL_RANK=str(r))
        for r in ranks
    ]
    assert [process.wait() for process in started] == [status] * len(ranks)
    assert re.search(said, started[0].stderr)


def dying_early(rank):
    """Be one of two that exchange something; the other one dies."""
    if rank == 1:
        os._exit(1)
    time.sleep(0.3)
    with patch("os._exit"), pytest.raises(SystemExit) as ended, one_line_errors():
        dist.all_reduce(torch.zeros(1))
    return ended.value.code


def test_a_death_during_start_up_is_one_line_and_status_2(run_ranks, capfd):
    assert run_ranks(dying_early, expect_errors=True) == [2, None]
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: another process died or fell silent: ")


def test_the_chosen_backend_is_that_of_a_launchers_processes_with_a_gpu(monkeypatch, environ):
    environ(DBSL_BACKEND="gloo", LOCAL_RANK=None)
    assert chosen_backend() is None
    environ(DBSL_BACKEND="mpi")
    with pytest.raises(ValueError, match="DBSL_BACKEND must be gloo or unset, got 'mpi'"):
        chosen_backend()
    given, launch = [], dbsl.cluster.launch

    def start(backend, *, timeout, **_):
        given.append((backend, timeout.total_seconds()))

    monkeypatch.setattr(launch, "restarts", lambda: 1)
    monkeypatch.setattr(launch, "connect_store", dist.HashStore)
    monkeypatch.setattr(launch, "_bind_to_launcher", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(launch.dist, "init_process_group", start)
    for backend in ("gloo", None):
        environ(DBSL_BACKEND=backend, LOCAL_RANK=0, RANK=2, WORLD_SIZE=2)
        prepare_group(1.0, cpu=False)
    # NCCL's watchdog ends a process without naming the rank: a watch decides before.
    assert given == [("gloo", 61.0), ("nccl", 61.0)]


@pytest.mark.parametrize("backend", ["gloo", "nccl", "cpu:gloo,cuda:nccl"])
def test_the_second_process_of_a_node_waits_over_gloo(monkeypatch, tmp_path, backend):
    """Which tells of a process that dies meanwhile, and asks for no GPU."""
    done, fake = [], SimpleNamespace(local_process_index=1)
    with first_on_node(fake):  # a process alone waits for nobody
        pass
    how = {"init_method": f"file://{tmp_path}/store", "timeout": timedelta(seconds=77)}
    dist.init_process_group("gloo", rank=0, world_size=1, **how)
    try:
        made = dist.new_group(backend="gloo")
        monkeypatch.setattr(dist, "get_backend", lambda group: backend)
        monkeypatch.setattr(dist, "new_group", lambda **own: done.append(own) or made)
        monkeypatch.setattr(dist, "barrier", done.append)
        with first_on_node(fake):
            done.append("second")
        fake.local_process_index = 0
        with first_on_node(fake):
            done.append("first")
        if backend == "gloo":
            assert done == [dist.group.WORLD, "second", "first", dist.group.WORLD]
        else:  # made once, as patient as the first
            assert done[0] == {"backend": "gloo", "timeout": timedelta(seconds=77)}
            assert done[1:] == [made, "second", "first", made]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("scaled", [False, True])
def test_accelerate_is_around_an_optimizer_only_where_gradients_are_scaled(scaled):
    accelerator = start_accelerator("no", 20.0)
    accelerator.scaler = torch.amp.GradScaler("cpu") if scaled else None
    weight = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], 0.1)
    assert (accelerator.prepare_optimizer(optimizer) is optimizer) is not scaled
    with torch.profiler.profile() as profiled:
        accelerator.backward(weight.sum())
    divides = [event for event in profiled.events() if event.name.startswith("aten::div")]
    assert bool(divides) is scaled
    assert weight.grad.tolist() == [65536.0 if scaled else 1.0] * 3


@pytest.mark.parametrize("sync", ["step", "bsp", "asp"])
def test_plan_only_measures_an_all_reduce_where_processes_wait_for_each_other(tmp_path, sync):
    settings = {"sync": sync, "plan_only": True, "slope": (1e-3, 2e-3), "intercept": (0.01,)}
    ranks = start_ranks(to_flags(tmp_path / "run", **settings), 2)
    assert wait_all(ranks) == [0, 0], ranks[0].stderr
    every = {"step": "a step", "bsp": "a round", "asp": ""}[sync]
    measured = re.findall(r"one all-reduce of 1[.\d]* MB .* (a step|a round)\n", ranks[0].stdout)
    assert measured == [every] * bool(every)
    assert "an epoch with equal batches " in ranks[0].stdout
    assert ranks[1].stdout == ""
    assert not (tmp_path / "run").exists()
