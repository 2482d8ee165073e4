"""What only a GPU can show, a moment each, in one process: `pytest -m gpu`."""

import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import dbsl.cluster.wire
import train
from dbsl.cluster.merges import ratio
from dbsl.cluster.server import Server
from dbsl.cluster.steps import ComputeTimer, JointSteps, take_step
from dbsl.cluster.weights import FlatWeights
from dbsl.cluster.wire import Channel
from dbsl.data.sources import image_batch
from dbsl.extras.noise import NoiseProbe
from dbsl.plan.members import Members
from dbsl.plan.sampler import Part, Step
from dbsl.plan.types import Turn
from dbsl.profile.memory import peak_bytes, room_bytes
from dbsl.run.accelerator import first_on_node, start_accelerator
from dbsl.run.connect import make_ready
from tests import helpers
from tests.helpers import rounds_of
from tests.unit.cluster.test_compiling import loss_of, run_of
from tests.unit.cluster.test_server import report, serving

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first matrix product
CUDA = torch.device("cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def whole_float32():
    """Convolve in float32, not TF32, so that results may be compared."""
    before, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    yield
    torch.backends.cudnn.allow_tf32 = before


def run(folder, **settings):
    """Return the weights of a run in float32, and the losses of its rounds."""
    helpers.run(folder, **{"mixed_precision": "no", "compile": False, **settings})
    losses = [row["loss"] for row in rounds_of(folder)]
    assert np.isfinite(losses).all()
    return load_file(folder / "model.safetensors"), losses


def small_net():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, 3))
    model.head_dropouts = []  # as `dbsl.model` has them
    return model.to(CUDA, memory_format=torch.channels_last)


def ready(model, *, compiled):
    """Return the weights of a model that has met batches of 4 and 8 images."""
    weights = FlatWeights(model)
    start_accelerator("no", 60.0)  # has cuDNN try its algorithms
    make_ready(run_of(model, {4, 8}, "cuda"), weights, (0,), compiled)
    return weights


def after_joint_steps(*, compiled):
    """Return the weights after three joint steps of two workers with 4 and 8 images."""
    model = small_net()
    weights = ready(model, compiled=compiled)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    stepper = JointSteps(model, weights, ComputeTimer(CUDA), {0: optimizer})
    step = Step((Part(0, np.arange(4), 4 / 12), Part(1, np.arange(8), 8 / 12)), 0.0)
    stepper.begin(Turn((0, 1), 0, 0))
    for _ in range(3):
        for part in step.parts:
            with stepper.micro_batch(step, part) as weight:
                images, labels = image_batch(len(part.indices), 16, 3, CUDA)
                (loss_of(model, images, labels) * weight).backward()
        stepper.complete(step)
        with stepper.stepping(step):
            take_step(stepper.optimizers[0], 0.1)
    return weights.vector


@pytest.mark.timeout(200)  # compiles four graphs
def test_compiled_joint_steps_equal_eager_ones():
    expected = after_joint_steps(compiled=False)
    torch.testing.assert_close(after_joint_steps(compiled=True), expected, rtol=0.01, atol=1e-3)


def test_shapes_met_before_training_leave_weights_and_random_numbers_alone():
    model = small_net()
    before = FlatWeights(model).vector.clone()
    random = torch.cuda.get_rng_state()
    assert torch.equal(ready(model, compiled=False).vector, before)
    assert torch.backends.cudnn.benchmark
    assert torch.equal(torch.cuda.get_rng_state(), random)


def test_fp16_with_clipping_gives_finite_losses(tmp_path):
    settings = {"large_batch_size": (10,), "small_workers": 1, "epochs": 2}
    _, losses = run(tmp_path / "run", mixed_precision="fp16", clip_grad=0.5, **settings)
    assert len(losses) == 8


@pytest.fixture
def same_bits(monkeypatch):
    """Compute to the bit what was computed before; the fastest algorithms are chosen by chance."""

    def without_trials(*given):
        accelerator = start(*given)
        torch.backends.cudnn.benchmark = False
        return accelerator

    start = train.start_accelerator
    monkeypatch.setattr(train, "start_accelerator", without_trials)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_a_run_stopped_in_a_round_and_resumed_goes_on_to_the_bit(tmp_path, same_bits):
    settings = {"local_batch_sizes": (4, 8), "workers": 2, "epochs": 2, "rounds_per_epoch": 2}
    whole = run(tmp_path / "whole", **settings)
    with helpers.stopped_at_step(3):
        run(tmp_path / "broken", **settings)
    resumed = run(tmp_path / "broken", resume="auto", **settings)
    assert resumed[1] == whole[1]
    assert all(torch.equal(tensor, whole[0][name]) for name, tensor in resumed[0].items())


def test_the_noise_probe_times_the_launches_of_a_pass_once(tmp_path, monkeypatch):
    seen, launch_s = [], NoiseProbe.launch_s
    monkeypatch.setattr(NoiseProbe, "launch_s", lambda *own: seen.append(launch_s(*own)) or seen[0])
    run(tmp_path / "run", local_batch_sizes=(8, 8), workers=2, sync="asp", epochs=1)
    assert len(seen) == 1
    assert 0 < seen[0] < 1


class Echo:
    """A pair's other end, which has in host memory what was sent, and sends it back."""

    def __init__(self):
        self.sent = []

    def rank(self):
        return 0

    def send(self, tensors, *_):
        (tensor,) = tensors
        assert tensor.device.type == "cpu"
        self.sent.append(tensor.clone())
        return SimpleNamespace(wait=lambda timeout: True)

    def recv(self, tensors, *_):
        tensors[0].copy_(self.sent.pop(0))
        return SimpleNamespace(wait=lambda timeout: True)


def test_a_vector_of_the_gpu_travels_in_chunks_while_the_gpu_computes(monkeypatch):
    monkeypatch.setattr(dbsl.cluster.wire, "CHUNK", 1000)
    vector, echo = torch.zeros(3500, device=CUDA), Echo()
    channel = Channel(echo, vector)
    torch.cuda._sleep(50_000_000)  # what fills the vector comes after the call of `send`
    vector.copy_(torch.linspace(-1, 1, 3500, device=CUDA))
    expected = vector.clone()
    channel.send(vector)
    channel.wait()
    vector.fill_(9.0)
    channel.receive()
    torch.testing.assert_close(vector, expected, rtol=0, atol=0)


def test_the_clock_counts_what_the_gpu_computes_and_not_what_the_host_does():
    timer = ComputeTimer(CUDA)
    spent = []
    for cycles in (100_000_000, 400_000_000):
        with timer.running((0,)):
            torch.cuda._sleep(cycles)
        spent.append(timer.take_seconds(0))
    assert 0.01 < spent[0] < spent[1] < 5.0
    assert timer.take_seconds(0) == 0.0


def test_peak_memory_is_that_of_the_allocator_and_is_given_back():
    small = peak_bytes(lambda: torch.ones(1, device=CUDA), CUDA)
    large = peak_bytes(lambda: torch.ones(64 * 2**20, device=CUDA), CUDA)  # 256 MiB
    assert large - small == pytest.approx(256 * 2**20, rel=0.1)
    assert 0 < room_bytes(CUDA) <= torch.cuda.get_device_properties(CUDA).total_memory


def test_the_noise_probe_finds_on_the_gpu_what_it_finds_on_the_cpu():
    found = {}
    for device in (torch.device("cpu"), CUDA):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 3)).to(device)
        probe = NoiseProbe("joined", every=1, workers=2, rounds=1, least=1, model=model)
        for worker, size in enumerate((4, 6)):
            images, labels = torch.randn(size, 3, 8, 8), torch.arange(size) % 3
            model.zero_grad()
            loss_of(model, images.to(device), labels.to(device)).backward()
            step = Step((Part(worker, np.arange(size), 1.0),), 0.0)
            said = probe.measure(Turn((worker,), 0, 0), step, False, images, labels, loss_of)
        found[device.type] = [float(said[name]) for name in ("micro_square", "gradient_square")]
    assert found["cuda"] == pytest.approx(found["cpu"], rel=1e-4)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_process_of_local_rank_1_waits_where_there_is_one_gpu(tmp_path, backend):
    store = f"file://{tmp_path}/store"
    dist.init_process_group(backend, init_method=store, rank=0, world_size=1)
    try:
        with first_on_node(SimpleNamespace(local_process_index=1)):
            pass
    finally:
        dist.destroy_process_group()


def test_the_server_in_host_memory_takes_and_gives_weights_of_the_gpu():
    weights = FlatWeights(nn.Linear(2, 1).to(CUDA))
    start = weights.vector.to("cpu", copy=True)
    owner = Server(start + 1, Members(1), ratio, staleness=None)
    cluster = serving(weights, owner)
    cluster.plan(Turn((0,), 0, 0))
    cluster.pull(Turn((0,), 0, 0))
    assert torch.equal(weights.vector.cpu(), start + 1)
    weights.vector += 2
    cluster.push([report(0)])
    torch.testing.assert_close(owner.snapshot(), start + 2)  # the mean of both
