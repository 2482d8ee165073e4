import copy
import itertools
import json
import random
import statistics
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import train
from dbsl.data.sources import image_batch
from dbsl.model import build_model
from dbsl.plan.types import TimeModel
from dbsl.profile import fit
from dbsl.profile import timing as profile
from dbsl.profile.cache import Profiler, cache_file, write_profiles
from dbsl.profile.fit import fit_time_model, measure_step_times
from dbsl.profile.memory import GIB, MemoryModel, confirm_batch, give_back, room_bytes
from dbsl.profile.timing import fit_profile, profile_memory, profile_steps
from dbsl.run.times import _reserve_bytes, largest_auto_batch, make_profiler
from dbsl.tools import profile as command
from tests.helpers import TINY, planned, refused
from train import Config

SIZES = [31, 62, 125, 250, 500]


@pytest.fixture(autouse=True)
def no_collections(monkeypatch):
    """Look for no garbage: a third of a second each."""
    monkeypatch.setattr("dbsl.profile.memory.gc", SimpleNamespace(collect=lambda: None))


@pytest.fixture(scope="module")
def built():
    return build_model("test_resnet", 3, (32,))


@pytest.fixture
def model(built):
    return copy.deepcopy(built)


def noting(sizes):
    """Return a loss function that notes the size of each batch."""

    def loss_of(module, images, labels):
        sizes.append(len(images))
        return module(images).square().mean()

    return loss_of


def spec_of(model, accelerator, setup=None, **ways):
    """Return steps of a small model on 16 px, in SGD with momentum where nothing else is said."""
    arguments = command.Arguments(model="test_resnet", num_classes=3, resolutions=(16,))
    example = partial(image_batch, classes=3, device=accelerator.device)
    spec = command.spec_of(arguments, model, accelerator, example)
    return replace(spec, setup={**spec.setup, **(setup or {})}, **ways)


def step_of(model, accelerator, micro_batch=None, **ways):
    return profile.TrainingStep(spec_of(model, accelerator, **ways), 16, micro_batch)


def test_fit_recovers_a_line_weighs_relative_errors_and_never_starts_below_zero():
    sizes = [8, 16, 32, 64]
    model = fit_time_model(sizes, [0.002 * x + 0.01 for x in sizes])
    assert (model.slope, model.intercept) == pytest.approx((0.002, 0.01))
    # One per cent too slow at 64 samples must not cost ten per cent at 8.
    model = fit_time_model(sizes, [0.026, 0.042, 0.074, 0.138 * 1.01])
    assert model.time(8, 1) == pytest.approx(0.026, rel=0.01)
    model = fit_time_model([8, 16, 32], [0.010, 0.025, 0.055])
    assert model.intercept == 0.0
    assert 0.010 / 8 < model.slope < 0.055 / 32


def test_flat_then_linear_times_are_fitted_as_both_pieces_where_they_show_both():
    def fit(true, **options):
        return fit_time_model(SIZES, [true.time(size, 1) for size in SIZES], **options)

    for true in (TimeModel(2e-5, 0.0, floor=5e-3), TimeModel(3e-5, 1e-3, floor=4e-3)):
        found = fit(true)
        expected = (true.slope, true.floor, true.intercept)
        assert (found.slope, found.floor, found.intercept) == pytest.approx(expected, abs=1e-9)
    bend = TimeModel(5e-5, 0.0, floor=9e-3)
    assert fit(bend).floor > 0
    assert fit(bend, errors=[0.1] * 5).floor == 0  # what noise may be is no floor
    assert fit(TimeModel(3e-5, 3e-3, floor=4e-3)).floor == 0  # one size below it: maybe an outlier
    assert fit_time_model([8, 16, 32], [0.01, 0.01, 0.02]).floor == 0


def test_all_flat_times_have_a_floor_or_hardly_a_slope():
    for wobble in (1.0, 0.99, 1.01):
        found = fit_time_model(SIZES, [5e-3] * 4 + [5e-3 * wobble])
        for size in SIZES:
            assert found.time(size, 1) == pytest.approx(5e-3, rel=0.02)


@pytest.mark.parametrize("intercept", [0.0, 0.02, 0.1])
def test_noise_of_5_percent_on_a_line_makes_no_floor(intercept):
    stream = np.random.default_rng(0)
    line = np.array([2e-4 * size + intercept for size in SIZES])
    for noise in np.exp(0.05 * stream.standard_normal((300, 5))):
        assert fit_time_model(SIZES, line * noise, errors=[0.05] * 5).floor == 0


def test_processes_of_one_machine_keep_their_times_apart(profiler, monkeypatch):
    """A device of the same name may be slower: another program may run on its core."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    alone, two = (profiler.setup | {"local_processes": n} for n in (1, 2))
    first = [cache_file(alone), cache_file(two)]
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert cache_file(alone) == first[0]
    assert cache_file(two) != first[1]


@pytest.mark.parametrize(
    ("large", "sizes"),
    [(64, [4, 8, 16, 32, 64]), (500, [31, 62, 125, 250, 500]), (3, [2, 3]), (1, [1])],
)
def test_measured_sizes_are_geometric_up_to_the_large_batch(large, sizes):
    assert profile.batch_sizes_to_measure(large) == sizes


@pytest.fixture
def clock(monkeypatch):
    """Return a clock that steps move on."""
    now = [0.0]
    monkeypatch.setattr(fit.time, "perf_counter", lambda: now[0])
    return now


def test_step_times_are_medians_of_turns_until_time_is_up(clock):
    """Steps are left out that compile; a block of the others takes a quarter of the longest."""
    taken, large, draw = [], [], random.Random(0)

    def step(size):
        taken.append(size)
        took = size / 8 if len(taken) < 10 or size == 1 else draw.uniform(0.3, 1.7)
        clock[0] += took if taken[1:] else 60.0
        large.extend([took] * (size == 8))

    times, errors = measure_step_times(step, [1, 8], seconds=150.0)
    turns = [size for size, _ in itertools.groupby(taken)]
    assert turns == [8, 1] * (len(turns) // 2) + [8]
    assert taken[:9] == [8, 1, 8, 1, 1, 8, 1, 1, 8]
    assert times == pytest.approx([0.125, statistics.median(large[2:])])
    assert max(errors) > 0.02  # noise keeps it large, so that it went on
    assert 150 < clock[0] < 155


@pytest.mark.parametrize(
    ("seconds", "held_up", "turns"), [(1e9, None, 4), (0.0, None, 2), (1e9, 5, 5)]
)
def test_step_times_stop_as_soon_as_they_are_precise_or_time_is_up(clock, seconds, held_up, turns):
    """A step that the machine held up leaves the median as precise as the others make it."""
    calls = []

    def step(size):
        clock[0] += 10.0 if len(calls) == held_up else 1.0
        calls.append(size)

    assert measure_step_times(step, [2, 8], seconds=seconds) == ([1.0, 1.0], [0.0, 0.0])
    assert calls == [8, 2, 8, *[2, 8] * turns]


def test_a_profile_says_its_line_and_how_far_that_is_off():
    exact = fit_profile(32, [4, 8], [0.03, 0.05], [0.0, 0.0])
    assert (exact.slope, exact.intercept) == pytest.approx((0.005, 0.01))
    line = "32 px: a step with x samples takes 5 ms * x + 10 ms (largest error 0.0%)"
    assert exact.describe() == line
    flat = fit_profile(32, SIZES, [5e-3, 5e-3, 5e-3, 5e-3, 1e-2], [0.01] * 5)
    assert "takes 0.02 ms * x + 0 ms, and 5 ms at least" in flat.describe()
    assert flat.largest_error < 1e-9
    bent = fit_profile(32, [4, 8, 16, 32, 64], [0.06, 0.051, 0.09, 0.17, 0.33], [0.01] * 5)
    assert bent.largest_error > 0.1


def test_profiling_leaves_the_model_and_the_random_numbers_as_they_were(accelerator, model):
    before = {name: t.clone() for name, t in model.state_dict().items()}
    random = torch.get_rng_state()
    measured = profile_steps(step_of(model, accelerator), [2, 4], seconds=0.05)
    assert measured.batch_sizes == [2, 4]
    assert measured.slope > 0
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert torch.equal(torch.get_rng_state(), random)


def test_a_step_in_micro_batches_is_measured_as_it_is_taken(accelerator, model):
    sizes = []
    step = step_of(model, accelerator, 4, loss_of=noting(sizes))
    step(10)
    step(4)
    assert sizes == [3, 3, 4, 4]


@pytest.mark.parametrize(
    ("device", "micro_batch", "before"), [("cpu", None, []), ("cuda", None, [3]), ("cuda", 4, [])]
)
def test_memory_of_whole_batches_on_cuda_is_measured_before_the_copy_is_compiled(
    monkeypatch, device, micro_batch, before
):
    """No graph is made for what is measured of memory alone."""
    done = []
    monkeypatch.setattr(profile, "compile_in_place", lambda *_, sums: done.append("compiled"))
    monkeypatch.setattr(profile, "measure_step_times", lambda *_, seconds: ([1.0, 2.0], [0.0, 0.0]))
    monkeypatch.setattr(profile, "profile_memory", lambda step, sizes: done.append(3))
    step = SimpleNamespace(resolution=16, micro_batch=micro_batch, compiles=True, model=None)
    step.accelerator = SimpleNamespace(device=torch.device(device))
    assert profile_steps(step, [4, 8], seconds=0.1).micro_batch == micro_batch
    assert done == [*before, "compiled"]


def test_state_is_that_of_the_optimizer_and_of_layers_that_are_trained(accelerator, model):
    weights = sum(4 * p.numel() for p in model.parameters())
    adamw = partial(torch.optim.AdamW, amsgrad=True)
    builds = (lambda model: adamw(model.parameters()), None)
    for build, copies in zip(builds, (3, 0), strict=True):
        step = step_of(model, accelerator, build_optimizer=build)
        step(4)
        assert step.state_bytes == pytest.approx(copies * weights, rel=0.01)
    model.requires_grad_(False)
    model.fc.requires_grad_(True)
    step = step_of(model, accelerator)
    step(4)
    assert step.state_bytes == sum(4 * p.numel() for p in model.fc.parameters())


def test_other_steps_have_profiles_of_their_own(accelerator, model):
    before = spec_of(model, accelerator).setup
    model.fc.requires_grad_(False)
    own = spec_of(model, accelerator).setup
    others = [{"optimizer": "adamw"}, {"momentum": False}, {"weight_decay": False}]
    others += [{"precision": "bf16"}, {"clip": True}, {"loss": "other text"}]
    setups = [before, own, *(own | other for other in others)]
    assert len({cache_file(setup) for setup in setups}) == len(setups) == 8


@pytest.mark.parametrize(
    ("settings", "processes", "copies", "states"),
    [
        ({}, 1, 5, 4),  # of four simulated workers, and the global weights
        ({}, 4, 2, 1),
        ({"sync": "step"}, 1, 1, 1),
        ({"push": "gradients"}, 1, 5, 1),
        ({"sync": "bsp", "wire": "int4"}, 1, 10, 4),  # and what is left of five roundings
        ({"sync": "bsp", "wire": "int4"}, 4, 4, 1),
        ({"sync": "step", "wire": "bf16"}, 4, 1, 1),
        ({"sync": "step", "wire": "powersgd:2"}, 4, 3, 1),
    ],
)
def test_memory_is_reserved_for_the_state_that_workers_have(settings, processes, copies, states):
    config = train.Config(workers=4, **settings)
    model = torch.nn.Linear(9, 1)  # 40 bytes
    assert _reserve_bytes(config, model, processes, 80.0) == copies * 40 + states * 80


class NoStep:
    """Notes each step's size, and whether cuDNN tries algorithms."""

    accelerator, state_bytes = SimpleNamespace(device=torch.device("cuda")), 5e6

    def __init__(self):
        self.taken = []

    def __call__(self, size):
        self.taken.append((size, torch.backends.cudnn.benchmark))
        if size == 1000:
            raise torch.OutOfMemoryError("CUDA out of memory.")


def test_memory_is_a_line_and_cudnn_tries_no_algorithms_for_it_nor_keeps_one(monkeypatch):
    step = NoStep()
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    bytes_of = {15: 2e9 + 15e6, 31: 2e9 + 31e6, 127: 2e9 + 127e6, 6: 1e9, 7: 1e9}
    monkeypatch.setattr(
        profile, "peak_bytes", lambda call, _: call() or bytes_of[step.taken[-1][0]]
    )
    found = profile_memory(step, [16, 32, 128])
    assert (found.fixed_bytes, found.sample_bytes) == pytest.approx((2e9, 1e6))
    assert found.state_bytes == 5e6
    assert {size for size, _ in step.taken} == {15, 31, 127}
    assert profile_memory(step, [7, 8]) is None
    with pytest.raises(torch.OutOfMemoryError):
        profile_memory(step, [16, 1001])
    assert not any(tried for _, tried in step.taken)
    assert torch.backends.cudnn.benchmark


MEMORY = MemoryModel(2 * GIB, GIB / 128, GIB / 2)


@pytest.mark.parametrize(
    ("processes", "gpus", "backend", "sharing"),
    [
        (2, 1, "gloo", 2),
        (4, 2, "gloo", 2),
        (1, 1, None, 1),
        (8, 8, None, 1),
        (8, 1, None, 1),  # each process is shown its own
    ],
)
def test_processes_on_one_gpu_share_its_free_memory(monkeypatch, processes, gpus, backend, sharing):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: GIB)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("DBSL_BACKEND", backend or "")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    assert room_bytes(torch.device("cuda")) == (8 * GIB / sharing + GIB) * 0.97


def test_what_measuring_took_of_a_gpu_is_given_back_before_training(accelerator, monkeypatch):
    emptied, given = [], []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    give_back(torch.device("cpu"))
    assert not emptied
    give_back(torch.device("cuda"))
    assert emptied
    monkeypatch.setattr("dbsl.run.times.give_back", given.append)
    planned(Config(**TINY | {"train_samples": 60}), accelerator)
    assert given == [accelerator.device]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("no"),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"),
        RuntimeError("GET was unable to find an engine to execute this computation"),
    ],
)
def test_confirming_step_backs_off_until_it_fits(error):
    tried = []

    def step(size):
        tried.append(size)
        if size > 90:
            raise error

    assert confirm_batch(step, 100) == 90
    assert tried == [100, 98, 96, 94, 92, 90]
    assert confirm_batch(step, 200, left=0.5) == 50


def test_other_errors_of_a_confirming_step_are_not_taken_for_want_of_memory():
    def fails(why):
        raise RuntimeError(why)

    with pytest.raises(RuntimeError, match="device-side assert"):
        confirm_batch(lambda _: fails("CUDA error: device-side assert triggered"), 10)
    with pytest.raises(RuntimeError, match="ALLOC_FAILED"):  # no sample fits
        confirm_batch(lambda _: fails("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), 3)


@pytest.fixture
def profiler(accelerator, monkeypatch, model):
    """Return a maker of profilers whose measurements are counted."""
    spec = spec_of(model, accelerator)
    measured = []

    def fake(step, batch_sizes, **_):
        measured.append((step.resolution, max(batch_sizes)))
        times = [0.01 + 0.001 * x for x in batch_sizes]
        return fit_profile(step.resolution, batch_sizes, times, [0.0] * len(times), memory=MEMORY)

    monkeypatch.setattr("dbsl.profile.cache.profile_steps", fake)
    monkeypatch.setattr("dbsl.profile.cache.room_bytes", lambda device: 9 * GIB)
    monkeypatch.setattr("dbsl.profile.cache.shortest_step", lambda step, size: 9.0)  # busy now

    def make(**options):
        return Profiler(spec, seconds=1.0, **options)

    make.setup, make.measured = spec.setup, measured
    return make


def test_profiles_are_measured_once_and_then_come_from_the_cache(profiler, capsys):
    first = profiler().profile(32, 64)
    assert profiler().profile(32, 64) == first
    assert profiler().profile(32, 48) == first  # within what was measured
    assert profiler.measured == [(32, 64)]
    assert "--profile again" in capsys.readouterr().out
    profiler().profile(24, 64)
    profiler().profile(32, 128)  # beyond it
    profiler(refresh=True).profile(32, 64)
    assert profiler.measured == [(32, 64), (24, 64), (32, 128), (32, 64)]
    assert profiler().profile(24, 64).resolution == 24  # still there beside the others


@pytest.mark.parametrize("from_file", [False, True])
def test_a_line_that_misses_its_times_is_told(profiler, monkeypatch, tmp_path, capsys, from_file):
    """Kept or fresh; times that are nearly flat have a good line, but noise may lie on one."""
    sizes, flat = (4, 8, 16, 32, 64), [1.0, 1.01, 1.0, 1.0, 1.01]
    for times, error, bad in ((flat, 0.0, 0), ([1.0, 3.0, 1.0, 3.0, 1.0], 0.0, 1), (flat, 0.2, 1)):
        fit = fit_profile(32, sizes, times, [error] * 5, memory=MEMORY)
        assert (fit.largest_error > 0.2) == (bad and not error)
        path = tmp_path / "profile.json" if from_file else cache_file(profiler.setup)
        write_profiles(path, profiler.setup, [fit])
        monkeypatch.setattr("dbsl.profile.cache.profile_steps", lambda *_, fit=fit, **__: fit)
        profiler(file=path if from_file else None).profile(32, 64)
        (line,) = [row for row in capsys.readouterr().out.splitlines() if "largest error" in row]
        assert ("predictions may be far off (--profile again" in line) == bad


def test_times_that_no_line_fits_are_measured_once_more_for_longer_and_again_by_the_next_run(
    profiler, monkeypatch
):
    """A machine that was busy for a while must not spoil all later runs."""
    sizes, asked = (4, 8, 16, 32, 64), []
    bad, worse, good = (
        fit_profile(32, sizes, [1.0, t, 1.0, t, 1.0], [0.0] * 5, memory=MEMORY)
        for t in (3.0, 9.0, 1.1)
    )
    found = iter([bad, worse, worse, good])
    target = "dbsl.profile.cache.profile_steps"
    monkeypatch.setattr(target, lambda *_, seconds: asked.append(seconds) or next(found))
    for best in (bad, good, good):
        assert profiler().profile(32, 64).times_s == [*best.times_s]
    assert asked == [1.0, 2.0] * 2


def test_kept_times_are_measured_again_if_steps_are_now_much_shorter(profiler, monkeypatch):
    """A busy machine can leave times that fit a line well, and it must not spoil later runs."""
    profiler().profile(32, 64)
    for share, measured in ((0.8, 1), (0.7, 2)):  # of what the line says
        now = lambda step, size, share=share: share * (0.01 + 0.001 * size)  # noqa: E731
        monkeypatch.setattr("dbsl.profile.cache.shortest_step", now)
        profiler().profile(32, 64)
        assert len(profiler.measured) == measured


def test_rough_times_are_not_kept_and_good_ones_serve_in_their_place(profiler):
    rough = profiler(rough=True).profile(32, 64)
    assert [*rough.batch_sizes] == [4, 16, 64]
    assert not cache_file(profiler.setup).exists()
    good = profiler().profile(32, 64)
    assert len(good.batch_sizes) == 5
    assert profiler(rough=True).profile(32, 64) == good


@pytest.mark.parametrize(
    ("settings", "seconds", "steps"),
    [
        ({"workers": 1, "small_workers": 0}, 3.0, True),
        ({"workers": 1, "small_workers": 1}, 10.0, True),
        ({"workers": 2, "small_workers": 0, "push": "gradients"}, 10.0, False),
    ],
)
def test_a_run_measures_its_own_step_and_one_worker_alone_for_a_short_time(
    accelerator, model, settings, seconds, steps
):
    config = Config(model="test_resnet", resolutions=(16,), **settings)
    data, loss_of = SimpleNamespace(num_classes=3, example=None), noting([])
    build = partial(train.build_optimizer, config=config)
    own = make_profiler(config, model, data, accelerator, loss_of, build)
    assert (own.seconds, own.rough) == (seconds, seconds == 3.0)
    assert own.spec.loss_of is loss_of
    assert own.spec.build_optimizer is (build if steps else None)


def test_profile_of_another_device_or_without_the_resolution_is_refused(profiler, tmp_path):
    path = tmp_path / "profile.json"
    known = profiler().profile(32, 64)
    write_profiles(path, profiler.setup | {"device": "NVIDIA H200"}, [known])
    message = "profile must be of this run's device .*, got 'NVIDIA H200'"
    with pytest.raises(ValueError, match=message):
        profiler(file=path)
    write_profiles(path, profiler.setup | {"loss": "other text"}, [replace(known, micro_batch=16)])
    own = profiler(file=path)
    assert own.profile(32, 64, 16).times_s == known.times_s
    for asked, told in (
        ((32, 64), "32 px with batches up to 64, got 32 px with batches up to 64 in micro-batches"),
        ((24, 64, 16), "24 px with batches up to 64 in micro-batches of 16, got 32"),
        ((32, 100, 16), "32 px with batches up to 100 in micro-batches of 16, got 32"),
    ):
        with pytest.raises(ValueError, match=f"profile must have {told}"):
            own.profile(*asked)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content.pop("setup"),
        lambda content: content.update(format=99),
        lambda content: content["profiles"][0].update(unknown=1),
        lambda content: content.clear(),
    ],
)
def test_a_file_that_is_no_profile_is_refused_and_in_the_cache_measured_again(profiler, damage):
    profiler().profile(32, 64)
    path = cache_file(profiler.setup)
    content = json.loads(path.read_text())
    damage(content)
    path.write_text(json.dumps(content) if content else "{ not json")
    with pytest.raises(ValueError, match="profile must be a file that python"):
        profiler(file=path)
    profiler().profile(32, 64)
    assert len(profiler.measured) == 2


@pytest.mark.parametrize(
    ("round_samples", "batch"), [(12500, 1250), (320, 32), (100, 16), (15, 15), (1, 1), (0, 1)]
)
def test_auto_leaves_ten_steps_a_round_whatever_fits(round_samples, batch):
    assert largest_auto_batch(round_samples) == batch


def test_largest_batch_comes_from_memory_as_it_is_now_and_from_the_samples(profiler, monkeypatch):
    profiler().profile(32, 64)  # kept, with the 9 GiB of room that there were
    tried = []
    monkeypatch.setattr("dbsl.profile.cache.TrainingStep", lambda *_: tried.append)
    for room, at_most, largest in ((9, 1000, 640), (9, 100, 100), (6, 1000, 256), (1, 1000, 1)):
        monkeypatch.setattr("dbsl.profile.cache.room_bytes", lambda _, room=room: room * GIB)
        own = profiler(reserve=lambda state: GIB + 2 * state)
        assert own.largest_batch(32, at_most) == largest  # (9 - 2 - 2) * 128
        assert tried.pop() == largest
    monkeypatch.setattr("dbsl.profile.cache.profile_memory", lambda *_: None)
    assert profiler().largest_batch(24, 1000) == 1000  # any fits
    assert tried == [1000, 1000]


def test_profile_from_the_shell(tmp_path, capsys):
    arguments = ["--model", "test_resnet", "--resolutions", "16,32", "--large-batch-size", "8"]
    arguments += ["--profile-seconds", "0.1", "--output", str(tmp_path / "profile.json")]
    arguments += ["--clip-grad", "--micro-batch-size", "4"]
    threads = torch.get_num_threads()
    command.main(arguments)
    torch.set_num_threads(threads)
    out = capsys.readouterr().out
    assert all(f"{r} px: a step with x samples takes" in out for r in (16, 32))
    written = json.loads((tmp_path / "profile.json").read_text())
    assert [row["resolution"] for row in written["profiles"]] == [16, 32]
    assert (written["setup"]["clip"], written["profiles"][0]["micro_batch"]) == (True, 4)


def test_profile_from_the_shell_refuses_in_one_line(capsys):
    line = refused(capsys, command.main, ["--model", "test_resnet", "--resolutions", "0"])
    assert line.startswith("resolutions must be in [1, 8192], got 0")
