"""This process's Accelerator: the other processes, the device and the precision."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import InitProcessGroupKwargs, parse_flag_from_env, patch_environment, reduce

from dbsl.base.errors import SettingError, SyncError, require, words_of
from dbsl.base.machine import launched_precision
from dbsl.cluster.launch import chosen_backend, group_timeout, prepare_group
from dbsl.cluster.wire import wait_for_all
from dbsl.config.settings import Precision

# Options of `accelerate launch` that are not supported here as it means them: the environment
# variable that it sets, the values that turn the option on, its name, and what to use instead.
_ON, _NOT_ONE = "(?!(0|no|false)?$).*", "(?!(0|no|false|1|auto)?$).*"
_WHOLE_MODEL = (
    "every worker holds the whole model, and --micro-batch-size lowers the memory of a step"
)
_ON_DEVICE = "a worker is a process on a GPU or a CPU"
_STEPS = "use --micro-batch-size, the samples at once"
_NOT_HERE = (
    ("ACCELERATE_USE_FSDP", _ON, "FSDP", _WHOLE_MODEL),
    ("ACCELERATE_USE_DEEPSPEED", _ON, "DeepSpeed", _WHOLE_MODEL),
    ("ACCELERATE_USE_MEGATRON_LM", _ON, "Megatron-LM", _WHOLE_MODEL),
    ("ACCELERATE_USE_PARALLELISM_CONFIG", _ON, "a parallelism config", _WHOLE_MODEL),
    ("ACCELERATE_IN_TPU_POD", _ON, "TPUs", _ON_DEVICE),
    ("PJRT_DEVICE", "tpu", "TPUs", _ON_DEVICE),
    ("ACCELERATE_DYNAMO_BACKEND", _ON, "torch.compile (dynamo_backend)", "use --compile"),
    ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", _NOT_ONE, "{} gradient accumulation steps", _STEPS),
    ("ACCELERATE_MIXED_PRECISION", "fp8", "mixed_precision fp8", "use bf16 or fp16"),
)
_LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # parameters of mallopt(3)
# Names in torch.cpu.get_capabilities(): x86, x86, Arm, Arm. AVX-512 without bf16 would convert.
_BF16_CPUS = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")


class PlainAccelerator(Accelerator):
    """Accelerate's, without what a step does not need if no scaler is used.

    Its optimizer looks for a package and reads a signature at each step (70 us). Its backward pass
    divides by the accumulation steps, which are 1 here: two extra kernels.
    """

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, **more: Any) -> Any:
        """Return the optimizer, wrapped for fp16's scaler if there is one."""
        return super().prepare_optimizer(optimizer, **more) if self.scaler else optimizer

    def backward(self, loss: torch.Tensor, **more: Any) -> None:
        """Compute the gradients of a loss, scaled if there is a scaler."""
        super().backward(loss, **more) if self.scaler else loss.backward(**more)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Refuse fp16, where it would divide by the scale once per worker's optimizer."""
        text = "gradients must be clipped by --clip-grad with mixed_precision fp16"
        require(self.scaler is None, text, "a call that unscales them")


def start_accelerator(
    precision: Precision,
    timeout_s: float,
    check: Callable[[PartialState], object] = lambda state: None,
) -> Accelerator:
    """Connect the processes within `timeout_s` seconds and choose one precision for all of them.

    ``auto`` is the precision given to `accelerate launch`; else bf16 if every process's device
    supports it, else float32. All processes call `check` once connected, before any other
    exchange.
    """
    cpu = _set_up_process()
    timeout = group_timeout(timeout_s, cpu=cpu)
    group = InitProcessGroupKwargs(backend=chosen_backend(), timeout=timeout)
    # If OMP_NUM_THREADS is unset, Accelerate would change torch's threads on a CPU.
    with patch_environment(omp_num_threads=torch.get_num_threads()):
        try:
            prepare_group(timeout_s, cpu=cpu)
            state = PartialState(cpu, **group.to_kwargs())
        except dist.DistError as error:  # torch says how many have joined
            limit = f"within {timeout.total_seconds():g} s (--worker-timeout)"
            raise SyncError(f"not all processes have met {limit}: {words_of(error)}") from error
        check(state)
        if precision == "auto" and (launched := launched_precision()):
            precision = launched
        elif precision == "auto":
            native = torch.tensor(int(computes_bf16(state.device)), device=state.device)
            precision = "bf16" if int(reduce(native, "sum")) == state.num_processes else "no"
        text = "mixed_precision must be no or bf16 on a CPU, where Accelerate leaves fp16 out"
        require(precision != "fp16" or state.device.type != "cpu", text, precision)
        accelerator = PlainAccelerator(cpu=cpu, mixed_precision=precision, kwargs_handlers=[group])
    if accelerator.num_processes == 1 and (warning := _others_expected()):
        print(f"warning: {warning}", file=sys.stderr)
    return accelerator


@contextlib.contextmanager
def first_on_node(accelerator: Accelerator) -> Iterator[None]:
    """Let the first process of each node finish before its others enter (a collective)."""
    first = accelerator.local_process_index == 0
    if not first:
        wait_for_all()
    yield
    if first:
        wait_for_all()


def nodes_of(accelerator: Accelerator) -> tuple[int, ...]:
    """Return each process's node number, from 0 (a collective)."""
    # Launchers number the processes node by node.
    first = _of_all(accelerator.local_process_index == 0, accelerator)
    return tuple(node - 1 for node in itertools.accumulate(first))


def common_threads(accelerator: Accelerator) -> int | None:
    """Return the CPU threads of each process; None if nodes differ (a collective)."""
    threads = {*_of_all(torch.get_num_threads(), accelerator)}
    return threads.pop() if len(threads) == 1 else None


def _of_all(value: int, accelerator: Accelerator) -> list[int]:
    return accelerator.gather(torch.tensor([int(value)], device=accelerator.device)).tolist()


def _set_up_process() -> bool:
    """Set up this process, and return whether it computes on the CPU."""
    check_launcher()
    keep_freed_memory()
    # Without cpu=True, processes on a machine without an accelerator would train separately. The
    # state is made before Accelerate reads what `accelerate launch --cpu` sets.
    cpu = not torch.accelerator.is_available() or parse_flag_from_env("ACCELERATE_USE_CPU")
    # Few shapes, many steps: trying cuDNN's algorithms once per shape pays off.
    torch.backends.cudnn.benchmark = not cpu
    return cpu


def check_launcher() -> None:
    """Refuse unsupported options of `accelerate launch`, which the environment shows."""
    for name, asks, what, way in _NOT_HERE:
        value = os.environ.get(name, "").lower()
        if re.fullmatch(asks, value):
            raise SettingError(
                f"accelerate launch must not ask for {what.format(value)} (see accelerate config): "
                f"{way}"
            )


def describe_precision(accelerator: Accelerator) -> str:
    """Return the precision of forward passes; for float32 on CUDA, also what runs in TF32."""
    precision = str(accelerator.mixed_precision)
    if precision != "no" or accelerator.device.type != "cuda":
        return precision
    # Not `allow_tf32`, which raises if a script has set one of these.
    kinds = torch.backends.cudnn.conv.fp32_precision, torch.backends.cuda.matmul.fp32_precision
    convolutions, products = ("TF32" if kind == "tf32" else "float32" for kind in kinds)
    return f"no (convolutions in {convolutions}, matrix products in {products})"


def _others_expected() -> str | None:
    """Return why the user may have expected several processes; this one trains by itself."""
    if "WORLD_SIZE" in os.environ:
        return None
    # For several processes, accelerate's simple launcher sets a master address, but sets no ranks
    # and starts one process.
    if "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_ADDR" in os.environ:
        return (
            "accelerate launch was asked for several processes and has started one; without GPUs, "
            "accelerate launch --multi_gpu --num_processes 2 starts two, as does torchrun "
            "--nproc-per-node 2"
        )
    tasks = os.environ.get("SLURM_NTASKS", "1")
    if tasks != "1" and os.environ.get("SLURM_PROCID", "0") == "0":
        return (
            f"Slurm has {tasks} tasks, and each that runs train.py trains alone, since RANK and "
            "WORLD_SIZE are unset; examples/clusters/slurm.sbatch sets them"
        )
    return None


def keep_freed_memory() -> None:
    """Have glibc reuse the memory of large tensors instead of returning it to the system.

    By default, each allocation above 32 MiB takes fresh pages, which are mapped and zeroed: for the
    activations of a training step, at every step. Without glibc it does nothing.
    """
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL("libc.so.6")
        library.mallopt(_M_MMAP_THRESHOLD, 2**30)
        library.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def computes_bf16(device: torch.device) -> bool:
    """Return whether a device multiplies bfloat16 matrices without converting them first."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "cpu":
        return any(torch.cpu.get_capabilities().get(name) for name in _BF16_CPUS)
    return device.type in ("xpu", "hpu")
