"""Steps, exchanges, loading and evaluation of these processes, each measured at least twice.

Rounds are those of a run, on few samples, in its own clusters. Where an exchange would take too
long for that, the link says how long it takes.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator

from dbsl.base.errors import SettingError, SyncError, reason_of
from dbsl.cluster.cluster import Cluster
from dbsl.cluster.formats import joint_messages, numbers_of, trained_shapes
from dbsl.cluster.steps import ComputeTimer, Stepper
from dbsl.cluster.weights import FlatWeights
from dbsl.config.hooks import Extras
from dbsl.config.settings import FLOAT32, takes_joint_steps
from dbsl.extras.emulate import EmulatedLink
from dbsl.log.meter import StepMeter
from dbsl.optimizer import make_clip
from dbsl.plan.islands import Islands
from dbsl.plan.machines import KnownWorkers
from dbsl.plan.stages import Stage
from dbsl.plan.types import Action, TimeModel, Turn
from dbsl.profile.fit import fit_time_model
from dbsl.profile.memory import GIB, MemoryModel, give_back, is_short_of_memory
from dbsl.profile.timing import TrainingStep, batch_sizes_to_measure, profile_memory
from dbsl.run.connect import connect
from dbsl.run.evaluation import EvaluationSession
from dbsl.run.prepare import plan_run
from dbsl.run.session import Session
from dbsl.run.stopping import Stopping, Stopwatch
from dbsl.run.training import Run
from dbsl.run.workers import make_profiler
from dbsl.tools.advise.ways import INNER, PLAIN, Measured, Way, rank, ways_of

SECONDS, SPREAD = 40.0, 0.05  # for all; what differs by more is measured again
_SHARE, _ROUND_S, _MOST_STEPS = 2.0, 0.6, 200  # of an exchange in the time left; of a round
_ROUNDS, _JOINT, _MERGES = 3, 5, 7  # by themselves, of joint steps, of merges; the first warms up
_AGAIN = 2  # at most so often
_TURNS = 4  # of all sizes, the first of which is rough
_LR, _ANY = 1e-8, TimeModel(1e-3, 1e-2)  # weights stay as they are; shares are equal
_SMALL, _FIRST, _LONG_S = 4096, 2**18, 1.0  # bytes to begin with, and seconds that are enough


class _Alone(Cluster):
    """A worker that meets nobody."""

    def turns(self) -> Iterator[Turn]:
        while not self.is_over:
            yield Turn(self.workers, *divmod(self._clock, self._rounds_per_epoch))
            self._clock += 1

    def pull(self, turn: Turn) -> None:
        pass

    def push(self, reports: Any) -> bool:
        return False


class _Nobody:
    """Stands for what logs and saves a run."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


class Bench:
    """Measures what a run's processes do, all at the same time; every method is a collective."""

    def __init__(self, run: Run, accelerator: Accelerator) -> None:
        self.run, self.accelerator = run, accelerator
        self.sure = self.loading = 0.0  # the largest spread; the share of a step that loads
        self.processes = accelerator.num_processes
        large, joint = run.known.large_batch_sizes, takes_joint_steps(run.config)
        if joint:
            plans = run.plans.items()
            total = {r: sum(w.local_batch_size for w in plan.workers) for r, plan in plans}
            large = {r: [-(-b // self.processes)] * self.processes for r, b in total.items()}
        self.large = {r: list(map(int, sizes)) for r, sizes in large.items()}

    def measure(self) -> Measured:
        """Return all that ways are predicted from."""
        run, config = self.run, self.run.config
        self.began = time.perf_counter()
        self.accelerator.print(f"measuring steps and exchanges, {SECONDS:.0f} s at most")
        memory, link = self.memory(), self.link()
        epochs = {
            r: sum(len(s.epochs) for s in run.stages if s.resolution == r) for r in self.large
        }
        found = Measured(
            models={r: self.steps(r) for r, count in epochs.items() if count},
            shares={r: count / config.epochs for r, count in epochs.items() if count},
            samples=len(run.data.train),
            least=run.sampler.least,
            large={r: self.large[r] for r, count in epochs.items() if count},
            shapes=trained_shapes(run.model),
            numbers=numbers_of(run.model),
            link=link,
            nodes=run.nodes,
            memory=memory,
        )
        ways = sorted(ways_of(config, found), key=rank)
        # If time is short: others are predicted from float32, and rounding to integers takes long.
        ways = sorted(ways, key=lambda way: (way.wire != "float32", way.kind != "bsp"))
        for number, way in enumerate(ways):
            left = {own.key for own in ways[number:]} - found.exchange_s.keys()
            if way.key in left:
                most_s = _SHARE * (SECONDS - self._spent()) / len(left)
                exchange_s = self.exchange(way, found, most_s)
                found = replace(found, exchange_s={**found.exchange_s, **exchange_s})
        return replace(found, sure=self.sure)

    # --- what is measured

    def memory(self) -> list[MemoryModel]:
        """Return what a step needs in each process; empty: batches make no difference."""
        run, resolution = self.run, max(self.large)
        profiler = make_profiler(run.config, run.model, run.data, self.accelerator, run.loss_of)
        step = TrainingStep(replace(profiler.spec, build_optimizer=run.build_optimizer), resolution)
        sizes = batch_sizes_to_measure(max(self.large[resolution]), 2)
        try:
            found = profile_memory(step, sizes)
        except RuntimeError as error:
            if not is_short_of_memory(error):
                raise
            text = "large_batch_size must be one with which a worker fits into memory"
            raise SettingError(f"{text}, got {sizes[-1]}") from None
        if found is not None:
            limit = run.config.memory_limit
            most = min(found.capacity_bytes, limit * GIB if limit else np.inf)
            reserve = profiler.reserve(found.state_bytes)
            found = replace(found, capacity_bytes=most, reserve_bytes=reserve)
        names = ("fixed_bytes", "sample_bytes", "capacity_bytes", "margin", "reserve_bytes")
        rows = self.gather([getattr(found, name) if found else -1.0 for name in names])
        return [MemoryModel(*row, found.source) for row in rows.tolist()] if rows.min() >= 0 else []

    def link(self) -> EmulatedLink:
        """Return the rate and the delay with which these processes sum a vector."""
        most = sum(joint_messages(FLOAT32, trained_shapes(self.run.model)))
        try:
            small_s, size = self._sum_s(_SMALL, 10), min(_FIRST, most)
            while (seconds := self._sum_s(size, 1)) < _LONG_S / 4 and size < most:
                size = min(4 * size, most)
            seconds = self._sum_s(size, 3 if seconds < _LONG_S else 2)
        except RuntimeError as error:
            text = f"the link between processes cannot be measured: {reason_of(error)}"
            raise SyncError(text) from error
        each, byte_s = 2 * (self.processes - 1), max((seconds - small_s) / (size - _SMALL), 1e-13)
        gbps = 8e-9 * each / self.processes / byte_s
        return EmulatedLink(gbps, 1e3 * small_s / each)

    def _sum_s(self, size: int, times: int) -> float:
        vector = torch.zeros(size // 4, device=self.accelerator.device)
        dist.all_reduce(vector)
        found = []
        for _ in range(times):
            began = self._now()
            dist.all_reduce(vector)
            found.append(self._now() - began)
        return float(self.gather([np.mean(found)]).max())

    def steps(self, resolution: int) -> TimeModel:
        """Return the time model of each process's steps by themselves, with their loading."""
        sizes, turns = batch_sizes_to_measure(max(self.large[resolution]), 3)[::2], []
        rough, spread = [np.full(self.processes, _ROUND_S)] * len(sizes), float("inf")
        while len(turns) < 3 or (
            len(turns) < _TURNS and spread > SPREAD and self._spent() < SECONDS / 2
        ):
            turns.append([])  # so that a slow spell falls on all sizes
            for size, times_s in zip(sizes, rough, strict=True):
                model = TimeModel(times_s / size, 0 * times_s)  # for all to be done together
                count = self._count(1 / (1 / times_s).mean(), times_s.max())
                short = self._short(resolution, [size] * self.processes, count, models=model)
                turns[-1].append(np.mean(self._train(short)[1:], 0))
            rough = [rows[:, 1] for rows in turns[-1]]
            spread = _spread(turns[1:])
        rows = np.mean(turns[1:], 0)  # [sizes, processes, 6]; the first turn was rough
        self.sure = max(self.sure, spread)
        self.loading = float((rows[-1, :, 2] / rows[-1, :, 1]).max())
        each = [fit_time_model(own[:, 5], own[:, 1]) for own in rows.swapaxes(0, 1)]
        return TimeModel.of(each, self.processes)

    def exchange(self, way: Way, found: Measured, most_s: float) -> dict[str, float | list[float]]:
        """Return the seconds of a way's exchange; nothing where that would take too long."""
        resolution, joint = max(found.shares), way.kind.startswith("step")
        workers = way.plans[resolution].workers
        sizes = [worker.local_batch_size for worker in workers]
        islands = Islands(way.settings.get("worker_processes") or (1,) * len(sizes))
        steps_s = islands.join(found.models[resolution]).time(np.array(sizes))
        step_s = float(steps_s.max())
        each_s = way.exchange_s / (workers[0].steps if joint else way.rounds)
        count = self._count(step_s + joint * each_s)
        count = count if joint else max(1, count // 2)
        round_s = count * step_s + (count if joint else 1) * each_s
        whole_s = found.link.all_reduce_s(4 * sum(found.numbers), self.processes)
        rounds = int(min(_JOINT if joint else _MERGES, (most_s - whole_s) / round_s))
        if rounds < 2:
            return {}
        how = (resolution, sizes, count, way, found.planned[resolution], rounds)
        again = joint and most_s > 2 * rounds * round_s
        rows = self._rounds(partial(self._short, *how), again=again)
        if joint:
            return {way.key: float(rows[:, 1].mean() - step_s)}
        beyond_s = rows[:, 0] + rows[:, 3]
        if way.kind == "asp":
            return {way.key: beyond_s.tolist()}
        owners = np.array(islands.owners)
        several = [w for w, size in enumerate(islands.sizes) if size > 1]
        several = [rows[owners == w, 1].mean() - steps_s[w] for w in several]
        inside = {INNER: max(0.0, float(np.mean(several)))} if several else {}
        # Whoever is late in a round, all wait: more than for the slowest on average.
        return {way.key: float((beyond_s + rows[:, 4]).mean() - rows[:, 4].max()), **inside}

    def evaluation_s(self) -> float:
        """Return about how long an evaluation takes, of which each process has a part."""
        run = self.run
        part = (run.config, self.accelerator, run.data, run.model, max(self.large), {})
        session, done = EvaluationSession(*part), 0
        session.batch_size = run.evaluation_batch
        run.model.eval()
        began = self._now()
        with torch.no_grad():
            for images, _ in session.evaluation_images():
                with self.accelerator.autocast():
                    run.model(images)
                done += len(images)
                if self._now() - began > _ROUND_S:
                    break
        seconds = (self._now() - began) / done * len(run.data.evaluation) / self.processes
        return float(self.gather([seconds]).max())

    # --- how

    def gather(self, values: list[float]) -> np.ndarray:
        """Return the numbers of all processes, float64 [processes, values]."""
        row = torch.tensor([values], dtype=torch.float64, device=self.accelerator.device)
        return self.accelerator.gather(row).cpu().numpy()

    def _now(self) -> float:
        if self.accelerator.device.type != "cpu":
            torch.accelerator.synchronize(self.accelerator.device)
        return time.perf_counter()

    def _spent(self) -> float:
        return float(self.gather([time.perf_counter() - self.began]).max())

    def _count(self, step_s: float, slowest_s: float = 0.0) -> int:
        """Return the steps of a round, of which the slowest takes two."""
        return int(np.clip(round(_ROUND_S / step_s), 2 * max(1, slowest_s / step_s), _MOST_STEPS))

    def _short(
        self,
        resolution: int,
        sizes: list[int],
        steps: int,
        way: Way | None = None,
        models: TimeModel = _ANY,
        rounds: int = _ROUNDS,
    ) -> Run:
        """Return the run of a way in epochs of one round, of so many steps of a worker."""
        run, workers = self.run, len(sizes)
        steps = min(steps, max(1, len(run.data.train) // sum(sizes)))
        wire = way.wire if way else "float32"
        own = {"sync": way.settings.get("sync", "bsp") if way else "bsp", "workers": workers}
        own |= {"wire": ":".join(wire.split(":")[:2]), "epochs": rounds}
        own |= {"small_workers": 0, "small_ratio": 0.0, "drop_last": False}
        own |= {"resolutions": (resolution,), "local_batch_sizes": tuple(sizes)}
        own |= {"worker_processes": way and way.settings.get("worker_processes")}
        config = replace(run.config, **{**PLAIN, **own})
        islands = Islands.of(config)
        models = TimeModel.of(models, self.processes)
        known = KnownWorkers(
            models={resolution: islands.join(models)},
            large_batch_sizes={resolution: sizes},
            measured=False,
            processes={resolution: models} if islands.several else None,
        )
        stage = Stage(0, 0, 0, rounds, resolution, 0.0, _LR)
        how = {"blocks": None, "say": str}
        short = plan_run(config, known, [stage], steps * sum(sizes), run.sampler.least, **how)
        config, plans, planner, sampler = short
        return replace(
            run,
            **{"config": config, "plans": plans, "planner": planner, "sampler": sampler},
            **{"known": known, "stages": (stage,), "islands": islands, "figures": ()},
            place=islands.place(self.accelerator.process_index) if islands.several else None,
            model=copy.deepcopy(run.model),
            extras=Extras(),
        )

    def _rounds(self, make: Callable[[], Run], *, again: bool = True) -> np.ndarray:
        """Return means over rounds in which the processes meet, [processes, 6]; see `_round`.

        With `again` they are taken until both halves of them take as long.
        """
        rounds: list[np.ndarray] = []
        for _ in range(_AGAIN if again else 1):
            rounds += self._train(make(), real=True)[1:]
            give_back(self.accelerator.device)
            spread = _spread(rounds)
            if spread < SPREAD or self._spent() > SECONDS:
                break
        if again and len(rounds) > 1:  # of one nothing is known
            self.sure = max(self.sure, spread)
        return np.mean(rounds, 0)

    def _train(self, run: Run, *, real: bool = False) -> list[np.ndarray]:
        """Return the seconds of each round; `real`: the processes meet."""
        accelerator = self.accelerator
        cluster, stepper = connect(run, accelerator) if real else self._alone(run)
        meter = StepMeter(run.config.log_every)
        meter.attach(cluster.workers, stepper, accelerator)
        meter.shares_batch = run.place is not None
        parts = (cluster, stepper, Stopping(), Stopwatch(), meter)
        session, found = Session(run, Path(), accelerator, *parts), []
        session.log = session.checkpointer = _Nobody()
        with cluster:
            for turn in cluster.turns():
                if isinstance(turn, Turn):
                    found.append(self._round(session, turn))
                list(cluster.reports())
            cluster.close()
        return [self.gather(own) for own in found]

    def _alone(self, run: Run) -> tuple[Cluster, Stepper]:
        worker, config = self.accelerator.process_index, run.config
        weights, timer = FlatWeights(run.model), ComputeTimer(self.accelerator.device, run.machine)
        optimizer = self.accelerator.prepare_optimizer(run.build_optimizer(run.model))
        stepper = Stepper(run.model, weights, timer, {worker: optimizer})
        stepper.clip = make_clip(run.model, config.clip_grad, config.clip_mode)
        how = {"planner": run.planner, "workers": (worker,), "epochs": config.epochs}
        return _Alone(weights, **how), stepper

    def _round(self, session: Session, turn: Turn) -> list[float]:
        """Take a round as train.py does.

        Return the seconds of its begin, of a step, of loading in a step, of its end, of all steps;
        and the samples of a step.
        """
        cluster, stepper = session.cluster, session.stepper
        moments, loading_s = [self._now()], 0.0
        with session.round(turn) as work:
            moments.append(time.perf_counter())
            for step in work.steps():
                began = time.perf_counter()
                for part, images, labels in work.parts(step):
                    loading_s += time.perf_counter() - began
                    with stepper.micro_batch(step, part) as weight:
                        loss = session.run.loss_of(stepper.model, images, labels)
                        session.accelerator.backward(loss * weight)
                    work.add(part, len(labels), loss.detach(), {})
                    began = time.perf_counter()
                with work.stepping(step, _LR):
                    stepper.step(step, _LR)
                cluster.agree(Action.GO_ON, round_over=work.over)
            moments.append(self._now())
            count = max(1, session.progress.steps)
            samples = sum(session.progress.samples.values())
        moments.append(self._now())
        begin_s, steps_s, end_s = np.diff(moments)
        return [begin_s, steps_s / count, loading_s / count, end_s, steps_s, samples / count]


def _spread(times: Sequence[Any]) -> float:
    """Return how much steps of both halves of measurements [n, ..., 6] differ, relative to all."""
    if len(times) < 2:
        return float("inf")
    steps_s = np.array(times)[..., 1]
    first, second = (half.mean(0) for half in np.array_split(steps_s, 2))
    return float((abs(first - second) / steps_s.mean(0)).max())
