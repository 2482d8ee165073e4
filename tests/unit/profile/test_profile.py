import copy
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import train
from dbsl.base.errors import SettingError
from dbsl.config.settings import RunConfig
from dbsl.data.sources import image_batch
from dbsl.model import build_model
from dbsl.plan.types import TimeModel
from dbsl.profile import fit
from dbsl.profile import timing as profile
from dbsl.profile.cache import Profiler, cache_file, write_profiles
from dbsl.profile.fit import fit_time_model, measure_step_times
from dbsl.profile.memory import GIB, MemoryModel, PeakMemory, confirm_batch, give_back
from dbsl.profile.timing import NO_OPTIMIZER, StepSpec, fit_profile, profile_memory, profile_steps
from dbsl.run.times import Measurements, _reserve_bytes, largest_auto_batch, make_profiler
from dbsl.tools import profile as command
from tests.helpers import planned, refused, run
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


def setup_of(model, accelerator, **changes):
    return replace(profile.Setup.of("test_resnet", model, 3, accelerator), **changes)


def step_of(model, accelerator, setup=None, **ways):
    spec = StepSpec(setup_of(model, accelerator, **setup or {}), model, accelerator, **ways)
    return profile.TrainingStep(spec, 16)


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
    alone, two = (replace(profiler.setup, local_processes=n) for n in (1, 2))
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
def timed(monkeypatch):
    """Return a clock, and the sizes and seconds of the blocks that torch's timer was asked for."""
    clock, turns, blocks = [0.0], [], []

    class FakeTimer:
        def __init__(self, statement, globals, num_threads):
            self.size = globals["batch_size"]

        def blocked_autorange(self, min_run_time):
            turns.append(self.size)
            blocks.append(min_run_time)
            clock[0] += 1.0
            outlier = 9.0 if turns.count(self.size) == 2 else 0.0
            return SimpleNamespace(times=[0.001 * self.size, outlier + 0.002])

    monkeypatch.setattr("torch.utils.benchmark.Timer", FakeTimer)
    monkeypatch.setattr("torch.utils.benchmark.timer", lambda: clock[0])  # waits for the device
    monkeypatch.setattr(profile.time, "perf_counter", lambda: clock[0])
    return clock, turns, blocks


def test_step_times_are_medians_of_turns_until_time_is_up(timed):
    _, turns, _ = timed
    warmed = []
    times, errors = measure_step_times(warmed.append, [2, 8], seconds=9.0)
    assert turns == [2, 8] * 5  # the outliers keep the errors large, so that it goes on
    assert times == [0.002, 0.008]
    assert all(error > 0.1 for error in errors)
    assert warmed == [8, 8]


def test_a_block_of_steps_is_a_quarter_of_one_that_follows_cudnns_trials(timed):
    clock, _, blocks = timed

    def step(batch_size):
        clock[0] += 1.0 if clock[0] else 60.0  # the first one tries algorithms, or compiles

    measure_step_times(step, [8], seconds=9.0)
    assert set(blocks) == {0.25}


def test_step_times_stop_as_soon_as_they_are_precise(monkeypatch):
    calls = []
    monkeypatch.setattr(fit, "_median_error", lambda taken: 0.01)
    times, errors = measure_step_times(calls.append, [2, 8], seconds=1e9)
    assert (len(times), errors, {*calls}) == (2, [0.01, 0.01], {2, 8})


def test_profile_says_from_which_batch_the_line_holds():
    fitted = fit_profile(32, [4, 8, 16, 32, 64], [0.06, 0.051, 0.09, 0.17, 0.33], [0.01] * 5)
    assert fitted.holds_from == 16
    assert fitted.largest_error > 0.1
    exact = fit_profile(32, [4, 8], [0.03, 0.05], [0.0, 0.0])
    assert (exact.slope, exact.intercept) == pytest.approx((0.005, 0.01))
    assert (exact.r_squared, exact.holds_from) == (pytest.approx(1.0), 4)
    assert "32 px: a step with x samples takes 5 ms * x + 10 ms" in exact.describe()
    flat = fit_profile(32, SIZES, [5e-3, 5e-3, 5e-3, 5e-3, 1e-2], [0.01] * 5)
    assert "takes 0.02 ms * x + 0 ms, and 5 ms at least" in flat.describe()
    assert flat.largest_error < 1e-9


def test_profiling_leaves_the_model_and_the_random_numbers_as_they_were(accelerator, model):
    before = {name: t.clone() for name, t in model.state_dict().items()}
    random = torch.get_rng_state()
    measured = profile_steps(step_of(model, accelerator), [2, 4], seconds=0.05, held_out=[3])
    assert (measured.batch_sizes, measured.held_out_sizes) == ((2, 4), (3,))
    assert len(measured.held_out_times_s) == 1
    assert measured.slope > 0
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert torch.equal(torch.get_rng_state(), random)


def test_a_step_in_micro_batches_is_measured_as_it_is_taken(accelerator, model):
    sizes = []
    step = step_of(model, accelerator, {"micro_batch": 4}, loss_of=noting(sizes))
    step(10)
    step(4)
    assert sizes == [3, 3, 4, 4]
    assert profile_steps(step, [4, 8], seconds=0.01).memory is None  # it does not follow the batch


def test_memory_is_measured_before_the_copy_is_compiled(accelerator, monkeypatch, model):
    done = []
    monkeypatch.setattr(profile, "compile_in_place", lambda *_, sums: done.append("compiled"))
    monkeypatch.setattr(profile, "measure_step_times", lambda *_, seconds: ([1.0, 2.0], [0.0, 0.0]))
    step = step_of(model, accelerator, {"compile": True}, loss_of=noting(done))
    profile_steps(step, [4, 8], seconds=0.1)
    assert done == [4, 4, 8, "compiled"]  # no graph for what is measured of memory alone


@pytest.mark.parametrize(
    ("setup", "copies", "settings"),
    [
        ({"optimizer": "sgd"}, 1, {}),
        ({"momentum": False}, 0, {}),
        ({"optimizer": "adamw"}, 2, {}),
        ({"optimizer": "adamw"}, 3, {"amsgrad": True}),
        ({"optimizer": NO_OPTIMIZER}, 0, {}),
    ],
)
def test_a_measured_step_has_the_optimizer_and_the_loss_of_training(
    accelerator, model, setup, copies, settings
):
    sizes = []
    step = step_of(model, accelerator, setup, loss_of=noting(sizes), optimizer_settings=settings)
    step(4)
    assert sizes == [4]
    weights = sum(4 * p.numel() for p in model.parameters())
    assert step.state_bytes == pytest.approx(copies * weights, rel=0.01)


def test_frozen_layers_have_no_state_and_other_steps_have_profiles_of_their_own(accelerator, model):
    before = setup_of(model, accelerator)
    model.requires_grad_(False)
    model.fc.requires_grad_(True)
    step = step_of(model, accelerator)
    step(4)
    assert step.state_bytes == sum(4 * p.numel() for p in model.fc.parameters())
    others = [{}, {"optimizer": "adamw"}, {"momentum": False}, {"weight_decay": False}]
    others += [{"micro_batch": 4}, {"precision": "bf16"}]
    setups = [before, *(setup_of(model, accelerator, **other) for other in others)]
    assert len({cache_file(setup) for setup in setups}) == 7


def test_a_run_measures_its_own_step(monkeypatch, tmp_path):
    steps, losses = [], []

    def fake(step, batch_sizes, **_):
        steps.append(step)
        losses.append(float(step._loss_of(torch.nn.Identity(), torch.ones(2), None)))
        return fit_profile(step.resolution, batch_sizes, batch_sizes, [0.0] * len(batch_sizes))

    def seven(model, x, labels, config):
        return 7 * model(x).sum(), {}

    monkeypatch.setattr("dbsl.profile.cache.profile_steps", fake)
    monkeypatch.setattr(train, "loss_function", seven)

    unknown = {"slope": None, "intercept": None, "train_samples": 200, "plan_only": True}
    for seed, extra in enumerate(({"optimizer": "adamw"}, {"push": "gradients"})):
        run(tmp_path, **unknown, **extra, seed=seed)
    own, pushed = steps
    assert isinstance(own._optimizer, torch.optim.AdamW)
    assert losses == [14, 14]  # train.py's own loss
    assert pushed._optimizer is None


@pytest.mark.parametrize(
    ("settings", "processes", "copies", "states"),
    [
        ({}, 1, 5, 4),  # of four simulated workers, and the global weights
        ({}, 4, 2, 1),
        ({"sync": "step"}, 1, 1, 1),
        ({"push": "gradients"}, 1, 5, 1),
    ],
)
def test_memory_is_reserved_for_the_state_that_workers_have(settings, processes, copies, states):
    config = train.Config(workers=4, **settings)
    model = torch.nn.Linear(9, 1)  # 40 bytes
    assert _reserve_bytes(config, model, processes, 80.0) == copies * 40 + states * 80


class NoStep:
    """Notes each step's size, and whether cuDNN tries algorithms."""

    state_bytes = 5e6

    def __init__(self, device):
        self.accelerator, self.taken = SimpleNamespace(device=torch.device(device)), []

    def __call__(self, size):
        self.taken.append((size, torch.backends.cudnn.benchmark))
        if size == 1000:
            raise torch.OutOfMemoryError("CUDA out of memory.")


def test_cudnn_tries_no_algorithms_while_memory_is_measured_nor_keeps_one_for_training(monkeypatch):
    step = NoStep("cuda")
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setattr(PeakMemory, "capacity", lambda self: 8 * GIB)
    monkeypatch.setattr(PeakMemory, "of", lambda _, call: call() or step.taken[-1][0] * GIB / 64)
    assert profile_memory(step, [16, 32, 64, 128]).sample_bytes == pytest.approx(GIB / 64)
    assert {size for size, _ in step.taken} == {15, 31, 63, 127}
    with pytest.raises(torch.OutOfMemoryError):
        profile_memory(step, [16, 1001])
    assert not any(tried for _, tried in step.taken)
    assert torch.backends.cudnn.benchmark


MEMORY = MemoryModel(2 * GIB, GIB / 128, 12 * GIB, 0.25, 1 * GIB, "by hand")


def test_memory_line_is_fitted_to_peaks(monkeypatch):
    step = NoStep("cpu")
    bytes_of = {4: 2e9 + 4e6, 8: 2e9 + 8e6, 16: 2e9 + 16e6, 5: 1e9, 7: 1e9}
    monkeypatch.setattr(PeakMemory, "of", lambda _, call: call() or bytes_of[step.taken[-1][0]])
    fitted = profile_memory(step, [8, 4, 16])
    assert fitted.state_bytes == 5e6
    assert fitted.sample_bytes == pytest.approx(1e6)
    assert fitted.fixed_bytes == pytest.approx(2e9)
    assert fitted.source == "resident memory of the process"
    assert profile_memory(step, [5, 7]) is None


def test_peak_memory_of_the_process_sees_a_tensor_that_is_gone_again():
    measure = PeakMemory(torch.device("cpu"))
    small = measure.of(lambda: torch.ones(1))
    large = measure.of(lambda: torch.ones(64 * 2**20))  # 256 MiB
    assert large - small == pytest.approx(256 * 2**20, rel=0.1)
    assert measure.capacity() > small


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
    assert PeakMemory(torch.device("cuda")).capacity() == 8 * GIB / sharing + GIB


def test_what_measuring_took_of_a_gpu_is_given_back_before_training(accelerator, monkeypatch):
    emptied, given = [], []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    for device, times in (("cpu", 0), ("cuda", 1)):
        give_back(torch.device(device))
        assert len(emptied) == times
    monkeypatch.setattr("dbsl.run.times.give_back", given.append)
    settings = {"train_samples": 60, "eval_samples": 20, "resolutions": (16,), "slope": (0.001,)}
    config = Config(model="test_resnet", lr=0.1, intercept=(0.01,), **settings)
    planned(config, accelerator)
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
def test_confirming_step_backs_off_until_it_fits(error, accelerator, model):
    tried = []

    def example(size, side):
        tried.append(size)
        if size > 90:
            raise error
        return image_batch(size, side, 3, accelerator.device)

    assert confirm_batch(step_of(model, accelerator, example=example), 100) == 90
    assert tried == [100, 95, 90]


def test_other_errors_of_a_confirming_step_are_not_taken_for_want_of_memory():
    def fails(why):
        raise RuntimeError(why)

    with pytest.raises(RuntimeError, match="device-side assert"):
        confirm_batch(lambda _: fails("CUDA error: device-side assert triggered"), 10)
    with pytest.raises(SettingError, match=r"a batch of one sample, got less \(.*ALLOC_FAILED\)"):
        confirm_batch(lambda _: fails("cuDNN error: CUDNN_STATUS_ALLOC_FAILED\nmore"), 3)


@pytest.fixture
def profiler(accelerator, monkeypatch, model):
    """Return a maker of profilers whose measurements are counted."""
    setup = setup_of(model, accelerator)
    measured = []

    def fake(step, batch_sizes, **_):
        measured.append((step.resolution, max(batch_sizes)))
        times = [0.01 + 0.001 * x for x in batch_sizes]
        return fit_profile(step.resolution, batch_sizes, times, [0.0] * len(times), MEMORY)

    monkeypatch.setattr("dbsl.profile.cache.profile_steps", fake)
    monkeypatch.setattr(PeakMemory, "capacity", lambda self: 12 * GIB)

    def make(setup=setup, **options):
        return Profiler(StepSpec(setup, model, accelerator), seconds=1.0, **options)

    make.setup, make.measured = setup, measured
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
def test_a_line_that_misses_its_times_is_told(
    profiler, monkeypatch, tmp_path, accelerator, capsys, from_file
):
    """Kept or fresh; a line that is flat, with no R2 to speak of, is a good one."""
    config = RunConfig(workers=1, resolutions=(32,))
    sizes = (4, 8, 16, 32, 64)
    for times, bad in (([1.0, 1.01, 1.0, 1.0, 1.01], False), ([1.0, 3.0, 1.0, 3.0, 1.0], True)):
        fit = fit_profile(32, sizes, times, [0.0] * 5, MEMORY)
        assert (fit.largest_error > 0.2, fit.r_squared < 0.9) == (bad, True)
        path = tmp_path / "profile.json" if from_file else cache_file(profiler.setup)
        write_profiles(path, profiler.setup, {32: fit})
        monkeypatch.setattr("dbsl.profile.cache.profile_steps", lambda *_, fit=fit, **__: fit)
        own = profiler(file=path if from_file else None)
        Measurements(config, own, accelerator).models([[64]], None)
        (line,) = [row for row in capsys.readouterr().out.splitlines() if "R2" in row]
        assert ("; a bad fit: predictions may be far off (--profile again" in line) == bad


@pytest.mark.parametrize("fresh", [1.1, 9.0])
def test_kept_times_that_no_line_fits_are_measured_again_and_the_better_ones_stay(
    profiler, monkeypatch, fresh
):
    """A machine that was busy for one first run must not spoil all later ones."""
    sizes = (4, 8, 16, 32, 64)
    kept, new = (
        fit_profile(32, sizes, [1.0, t, 1.0, t, 1.0], [0.0] * 5, MEMORY) for t in (3.0, fresh)
    )
    write_profiles(cache_file(profiler.setup), profiler.setup, {32: kept})
    counted, target = [], "dbsl.profile.cache.profile_steps"
    monkeypatch.setattr(target, lambda *_, **__: counted.append(1) or new)
    better = min(kept, new, key=lambda each: each.largest_error)
    assert kept.misses
    assert profiler().profile(32, 64).times_s == better.times_s
    assert profiler().profile(32, 64).times_s == better.times_s
    assert len(counted) == (1 if not better.misses else 2)


def test_rough_times_are_not_kept_and_good_ones_serve_in_their_place(profiler):
    rough = profiler(rough=True).profile(32, 64)
    assert rough.batch_sizes == (4, 16, 64)
    assert not cache_file(profiler.setup).exists()
    good = profiler().profile(32, 64)
    assert len(good.batch_sizes) == 5
    assert profiler(rough=True).profile(32, 64) == good


@pytest.mark.parametrize(
    ("settings", "seconds"),
    [
        ({"workers": 1, "small_workers": 0}, 3.0),
        ({"workers": 1, "small_workers": 1}, 30.0),
        ({"workers": 2, "small_workers": 0}, 30.0),
    ],
)
def test_one_worker_alone_measures_for_a_short_time(
    accelerator, tmp_path, monkeypatch, model, settings, seconds
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    given = []

    def fake(step, batch_sizes, *, seconds, held_out):
        given.append(seconds)
        return fit_profile(step.resolution, batch_sizes, batch_sizes, batch_sizes, MEMORY)

    monkeypatch.setattr("dbsl.profile.cache.profile_steps", fake)
    config = Config(model="test_resnet", resolutions=(16,), **settings)
    data = SimpleNamespace(num_classes=3, example=None)
    make_profiler(config, model, data, accelerator, None).profile(16, 64)
    assert given == [seconds]
    assert bool(list(tmp_path.rglob("*.json"))) == (seconds != 3.0)


def test_profile_of_another_device_or_without_the_resolution_is_refused(profiler, tmp_path):
    path = tmp_path / "profile.json"
    profiles = {32: profiler().profile(32, 64)}
    write_profiles(path, replace(profiler.setup, device="NVIDIA H200"), profiles)
    message = "profile must be of this run's device .*, got 'NVIDIA H200'"
    with pytest.raises(ValueError, match=message):
        profiler(file=path).profile(32, 64)
    write_profiles(path, replace(profiler.setup, micro_batch=16), profiles)
    own = profiler(file=path)
    assert own.in_micro_batches(16).profile(32, 64) == profiles[32]
    with pytest.raises(ValueError, match="profile must be of this run's micro_batch None, got 16"):
        own.profile(32, 64)
    write_profiles(path, profiler.setup, profiles)
    assert profiler(file=path).profile(32, 64) == profiles[32]
    with pytest.raises(ValueError, match="profile must have 24 px with batches up to 64"):
        profiler(file=path).profile(24, 64)
    with pytest.raises(ValueError, match="profile must have 32 px with batches up to 100"):
        profiler(file=path).profile(32, 100)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content.pop("setup"),
        lambda content: content.update(format=99),
        lambda content: content["profiles"]["32"].update(times_s=[0.0] * 5),
        lambda content: content["profiles"]["32"].update(times_s=[math.inf] * 5),
        lambda content: content["profiles"]["32"].update(slope=math.nan),
        lambda content: content["profiles"]["32"].update(unknown=1),
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
        profiler(file=path).profile(32, 64)
    profiler().profile(32, 64)
    assert len(profiler.measured) == 2


@pytest.mark.parametrize(
    ("round_samples", "batch"), [(12500, 1250), (320, 32), (100, 16), (15, 15), (1, 1), (0, 1)]
)
def test_auto_leaves_ten_steps_a_round_whatever_fits(round_samples, batch):
    assert largest_auto_batch(round_samples) == batch


def test_largest_batch_comes_from_memory_as_it_is_now_and_from_the_samples(profiler, monkeypatch):
    profiler().profile(32, 64)  # kept with the 12 GiB that there were

    def largest_batch(**options):
        return profiler(reserve=lambda state: GIB + 2 * state).largest_batch(32, **options)

    assert largest_batch(at_most=1000) == 768  # (12*0.75 - 1 - 2) * 128
    assert largest_batch(at_most=100) == 100
    monkeypatch.setattr(PeakMemory, "capacity", lambda self: 8 * GIB)  # others have the rest
    assert largest_batch(at_most=1000) == 384
    assert "512 fit into 8.0 GiB with 25% left free" in profiler().profile(32, 64).describe()
    monkeypatch.setattr(PeakMemory, "capacity", lambda self: GIB)
    with pytest.raises(SettingError, match=r"memory must be at least 4.01 GiB .* 1.00 GiB"):
        largest_batch(at_most=1000)


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
    assert set(written["profiles"]) == {"16", "32"}
    assert (written["setup"]["clip"], written["setup"]["micro_batch"]) == (True, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--held-out", "200"], "held_out must be in [2, 128], got 200"),
        (["--model", "resnet1"], "model must be a name that timm.list_models() knows"),
        (
            ["--model", "test_resnet", "--resolutions", "0"],
            "resolutions must be in [1, 8192], got 0",
        ),
    ],
)
def test_profile_from_the_shell_refuses_in_one_line(capsys, arguments, message):
    assert refused(capsys, command.main, arguments).startswith(message)
