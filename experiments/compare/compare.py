"""Arms of a comparison side by side: runs them with several seeds, then tables and pictures.

    python -m experiments.compare configs/mine/*.yaml --seeds 3 --baseline all_large --jobs 2

Every YAML is an arm, a config of train.py. A run that is finished is not run again and one that was
stopped goes on, so that the same command takes up where it was left. The tables are written after
every run. Their rows count as finished runs of the same settings, so that a clone of a repository
with committed rows goes on where another machine stopped.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from dbsl.base.errors import SettingError, as_given, plural, require
from dbsl.base.files import check_folder, write_text
from dbsl.base.machine import threads_of_process
from dbsl.config import parse
from dbsl.config.fields import Count, Within, check_fields
from dbsl.config.hooks import defaults_of_extras
from dbsl.run.stopping import Stopping
from experiments.compare.jobs import (
    SCRIPT,
    Launch,
    check_flags,
    has_checkpoint,
    is_finished,
    launch_all,
)
from experiments.compare.report import only_writer, read_runs, write_comparison, write_runs
from experiments.compare.statistics import ArmRun, equal_time_epochs, read_run

# There are many runs: each leaves its figures and last weights, no checkpoints.
_DEFAULTS = {"report_to": "none", "keep_checkpoints": 0, "save_best": False}
_FREE = {*_DEFAULTS, "checkpoint_every"}  # these move no result: what is kept, and how often
# Settings that a comparison gives by itself, that would make one run of all, or that train none.
_OWN = ("seed", "output_dir", "resume", "config")
_OWN += ("plan_only",)


@dataclass(frozen=True)
class CompareConfig:  # every field is a flag, its comment the help
    """Run arms (configs of train.py) with several seeds and compare them."""

    # YAML files, configs of train.py; each is an arm
    arms: tuple[str, ...] = field(metadata=parse.POSITIONAL)
    seeds: Count = 3  # runs of each arm, with seeds first_seed, first_seed + 1, ...
    first_seed: int = 0  # first seed; tune with seeds that you do not report, say 100
    baseline: str | None = None  # arm that the others are compared with; unset: the first
    # accuracy whose time is reported, in (0, 1]; unset: a point below the baseline's last epoch
    target: Annotated[float, Within(0, 1, open_low=True)] | None = None
    # train every arm again, with as many epochs as fit into the baseline's time
    equal_time: bool = False
    # setting of all arms as name=value, say dataset=FOLDER; may be repeated
    set: tuple[str, ...] = field(default=(), metadata=parse.REPEATED)
    # values of a setting as name=value,value; makes an arm of each; may be repeated
    vary: tuple[str, ...] = field(default=(), metadata=parse.REPEATED)
    jobs: Count = 1  # runs at a time
    # folder of the runs; each is in <folder of the arms>-<arm>-s<seed>
    runs_dir: str = "runs"
    # folder of tables and pictures; unset: results/<folder of the arms>
    output_dir: str | None = None
    report_only: bool = False  # write tables of the finished runs, and train nothing

    def __post_init__(self) -> None:
        check_fields(self)
        Within(0, 2**63 - self.seeds).check("first_seed", self.first_seed)
        names = [Path(arm).stem for arm in self.arms]
        alike = not names or len(set(names)) < len(names)
        text = "arms must be one or more YAML files with different names"
        require(not alike, text, ", ".join(names) or "none")
        for option in ("set", "vary"):
            for setting in getattr(self, option):
                if "=" not in setting:
                    raise SettingError(f"{option} must be of the form name=value, got {setting}")
        given = [name for name, _ in _pairs((*self.set, *self.vary))]
        if twice := [name for name in given if given.count(name) > 1]:
            raise SettingError(f"set and vary must give a setting once, got {twice[0]} twice")
        for name, value in _pairs(self.vary):
            values = value.split(",")
            if not all(values) or len(set(values)) < len(values):
                raise SettingError(f"vary must have values that differ, got {name}={value}")
        names = [name + end for name in names for end, _ in _variations(self.vary)]
        if self.baseline is not None and self.baseline not in names:
            raise SettingError(f"baseline must be one of {', '.join(names)}, got {self.baseline}")

    @property
    def seed_range(self) -> range:
        """The seeds of each arm's runs."""
        return range(self.first_seed, self.first_seed + self.seeds)

    @property
    def group(self) -> str:
        """The folder of the arms, by which runs and tables are named."""
        return Path(self.arms[0]).resolve().parent.name

    @property
    def output(self) -> Path:
        """The folder of tables and pictures."""
        return Path(self.output_dir or f"results/{self.group}")


@dataclass(frozen=True)
class Arm:
    """A config to be run with several seeds."""

    name: str  # in the table: the file's, and the values varied
    run: str  # name of its runs' folders
    path: Path
    settings: Mapping[str, Any]  # the file's, its bases' and `extra`
    extra: Mapping[str, Any]  # settings that are not from the file
    dataset: str = ""  # its name; `settings` may name a local copy

    def with_epochs(self, epochs: int, before: int) -> Arm:
        """Return the arm with other epochs; milestones and warm-up move in proportion."""
        if epochs == before:
            return self
        extra = {"epochs": epochs}
        given = _alike({n: self.settings.get(n) for n in ("lr_milestones", "warmup_epochs")})
        found = {n: [v for v in own if isinstance(v, float)] for n, own in given.items()}
        if own := found.get("lr_milestones"):
            moved = {round(milestone * epochs / before) for milestone in own}
            extra["lr_milestones"] = sorted(moved & set(range(1, epochs)))
        if own := found.get("warmup_epochs"):
            extra["warmup_epochs"] = own[0] * epochs / before
        return replace(
            self,
            run=f"{self.name}-{epochs}epochs",
            settings={**self.settings, **extra},
            extra={**self.extra, **extra},
        )

    @property
    def hash(self) -> str:
        """Tell these settings from others on any machine.

        Where the data lie does not count, if the arm names its dataset.
        """
        text = json.dumps(_alike(self.settings) | {"dataset": self.dataset}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def flags(self, seed: int, folder: Path, jobs: int) -> tuple[str, ...]:
        """Return the flags of train.py for one run of several at a time."""
        extra = {**self.extra, "seed": seed}
        extra |= {
            name: value
            for name, value in _DEFAULTS.items()
            if name not in self.settings
            if name != "report_to" or name in defaults_of_extras()  # its file may be deleted
        }
        # A run that goes on keeps the threads that it began with.
        if "cpu_threads" not in self.settings and jobs > 1 and not has_checkpoint(folder):
            extra["cpu_threads"] = threads_of_process(jobs)
        return ("--config", str(self.path), *parse.yaml_to_argv(extra))


def main(argv: Sequence[str] | None = None) -> None:
    """Run the arms that are not finished, and report."""
    argv = sys.argv[1:] if argv is None else list(argv)
    config = parse.parse_flags(CompareConfig, argv, prog="python -m experiments.compare")
    shared = _as_yaml(_pairs(config.set))
    arms = [
        _read_arm(Path(path), end, {**shared, **values})
        for path in config.arms
        for end, values in _variations(config.vary)
    ]
    for place, named in dict.fromkeys((str(a.settings.get("dataset")), a.dataset) for a in arms):
        if place not in ("None", named):
            print(f"{place} is taken for a copy of {named}, of which rows and runs count")
    baseline = config.baseline or arms[0].name
    report = partial(
        write_comparison,
        baseline=baseline,
        target=config.target,
        folder=config.output,
        command=_command(argv, config.arms),
    )
    with Stopping(then="stopping the runs, which save") as stopping:
        runs = _Table("arms", arms, config).make(stopping)
        print(report(runs))
        if not config.equal_time:
            return
        if not runs[baseline]:
            raise SettingError(f"equal_time must have a finished run of {baseline}, got none")
        scaled = [
            arm.with_epochs(equal_time_epochs(own, runs[baseline]), own[0].epochs)
            for arm in arms
            if (own := runs[arm.name])
        ]
        runs = _Table("equal_time", scaled, config).make(stopping)
        print("\nwith epochs that take the baseline's time:")
        print(report(runs, name="equal_time"))


class _Table:
    """One table of a comparison, and the runs that it lacks.

    Its rows count as finished runs where arm, seed and settings agree. Rows of other settings are
    refused; but those of equal time stand for what the baseline's time was before, and make room.
    """

    def __init__(self, name: str, arms: Sequence[Arm], config: CompareConfig) -> None:
        self.name, self.arms, self.config = name, arms, config
        self.recorded = read_runs(config.output, name)
        # Of equal time: an arm that has the baseline's already is the same run.
        self.done = self._of_arms(read_runs(config.output, "arms")) | self._of_arms(self.recorded)
        self.lacking: dict[Path, tuple[Arm, int]] = {}  # by the folder of the run
        self.folders: list[Path] = []  # of all runs
        for seed in config.seed_range:  # all arms with one seed before any with the next
            for arm in arms:
                folder = Path(config.runs_dir) / f"{config.group}-{arm.run}-s{seed}"
                self.folders.append(folder)
                is_needed = is_finished(folder) or not config.report_only
                if (arm.name, seed) not in self.done and is_needed:
                    self.lacking[folder] = arm, seed

    def make(self, stopping: Stopping) -> dict[str, list[ArmRun]]:
        """Make the runs that are lacking, and return all that are finished, by arm."""
        self._check()
        if others := _made_by_another(self.folders):
            what = f"{plural(len(others), 'run')} of this table, such as {others[0]}"
            print(f"warning: another {SCRIPT.name} made {what}", flush=True)
        for folder, (arm, _) in self.lacking.items():
            if not folder.exists():
                folder.parent.mkdir(parents=True, exist_ok=True)
                write_text(_note_of(folder), parse.config_to_yaml(arm.settings))
        if not self.config.report_only:
            jobs, group = self.config.jobs, self.config.group
            launches = [
                Launch(
                    f"{arm.run}, seed {seed}",
                    folder,
                    arm.flags(seed, folder, jobs),
                    _names_in_trackers(group, arm.run, seed),
                )
                for folder, (arm, seed) in self.lacking.items()
            ]
            launch_all(launches, jobs, stopping, on_finished=self._collect)
        return self._collect()

    def _check(self) -> None:
        """Refuse what cannot be run or written, before anything is."""
        check_folder("output_dir", self.config.output)
        if not self.config.report_only:
            check_folder("runs_dir", Path(self.config.runs_dir))
        to_run = [arm for folder, (arm, _) in self.lacking.items() if not is_finished(folder)]
        for arm in {arm.name: arm for arm in to_run}.values():
            try:
                check_flags(("--config", str(arm.path), *parse.yaml_to_argv(arm.extra)))
            except SettingError as error:
                raise SettingError(f"{error} (arm {arm.name})") from None
        for folder, (arm, _) in self.lacking.items():
            _check_same(arm, folder)
        self._check_rows(self.recorded)

    def _collect(self) -> dict[str, list[ArmRun]]:
        """Read the runs that have ended, write the table, and return all finished runs by arm."""
        for folder, (arm, seed) in self.lacking.items():
            if (arm.name, seed) not in self.done and is_finished(folder):
                run = read_run(folder)
                require(run.seed == seed, f"seed of {folder} must be {seed}", run.seed)
                self.done[arm.name, seed] = replace(run, settings=arm.hash)
        found: dict[str, list[ArmRun]] = {arm.name: [] for arm in self.arms}
        output = self.config.output
        if self.done or output.exists():
            with only_writer(output):
                now = read_runs(output, self.name)  # another command may have written since
                self.done.update(self._of_arms(now) | self.done)
                for (name, _), run in sorted(self.done.items()):
                    found[name].append(run)
                self._check_rows(now)
                if filled := {name: rows for name, rows in found.items() if rows}:
                    rows = now | filled  # rows of other arms stay
                    # In one order, whichever run ends first.
                    order = dict.fromkeys((*self.recorded, *found, *rows))
                    write_runs({arm: rows[arm] for arm in order if arm in rows}, output, self.name)
        seeds = self.config.seed_range
        return {name: [run for run in rows if run.seed in seeds] for name, rows in found.items()}

    def _of_arms(self, rows: Mapping[str, Sequence[ArmRun]]) -> dict[tuple[str, int], ArmRun]:
        """Return the rows that are runs of the arms as they are now, by arm and seed."""
        return {
            (arm.name, run.seed): run
            for arm in self.arms
            for run in rows.get(arm.name, ())
            if run.settings == arm.hash
        }

    def _check_rows(self, rows: Mapping[str, Sequence[ArmRun]]) -> None:
        """Refuse rows of the arms with other settings: new ones would replace them."""
        for arm in self.arms if self.name == "arms" else ():
            other = [run for run in rows.get(arm.name, ()) if run.settings != arm.hash]
            if other:
                which = "other settings" if other[0].settings else "settings that were not recorded"
                raise SettingError(
                    f"output_dir must have no rows of arm {arm.name} with other settings, got "
                    f"{plural(len(other), 'row')} of {which} in {self.config.output}/arms_runs.csv;"
                    " take another output_dir, or remove them"
                )


def _names_in_trackers(group: str, arm: str, seed: int) -> dict[str, str]:
    """Return the variables by which W&B groups runs: a comparison, its arms, their seeds."""
    return {
        "WANDB_RUN_GROUP": os.environ.get("WANDB_RUN_GROUP") or group,
        "WANDB_JOB_TYPE": os.environ.get("WANDB_JOB_TYPE") or arm,
        "WANDB_NAME": f"{arm}-s{seed}",
    }


def _command(argv: Sequence[str], arms: Sequence[str]) -> str:
    """Return the command as a person would type it: all of a folder's files as a pattern."""
    folder = Path(arms[0]).parent
    words = [word for word in argv if word not in arms]
    if sorted(map(Path, arms)) == sorted(folder.glob("*.yaml")):
        named = "*.yaml" if folder == Path() else f"{folder}/*.yaml"
    else:
        named = shlex.join(arms)
    return " ".join(
        ["python -m experiments.compare", named, *([shlex.join(words)] if words else [])]
    )


def _pairs(settings: Sequence[str]) -> list[tuple[str, str]]:
    pairs = (setting.split("=", 1) for setting in settings)
    return [(name.replace("-", "_"), value) for name, value in pairs]


def _as_yaml(settings: Iterable[tuple[str, str]]) -> dict[str, bool | str]:
    return {name: {"true": True, "false": False}.get(v.lower(), v) for name, v in settings}


def _variations(vary: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
    """Return the end of an arm's name and the settings of each combination of varied values."""
    varied = [[(name, v) for v in values.split(",")] for name, values in _pairs(vary)]
    return [
        ("".join(f"-{name}{v.replace('/', '-')}" for name, v in chosen), _as_yaml(chosen))
        for chosen in itertools.product(*varied)
    ]


def _read_arm(path: Path, end: str, shared: Mapping[str, Any]) -> Arm:
    settings = parse.read_settings(path)
    for name in _OWN:
        if name in settings or name in shared:
            where = path if name in settings else "set or vary"
            raise SettingError(f"an arm must leave {name} to the comparison, got it in {where}")
    own = path.stem + end
    named, given = settings.get("dataset"), str(shared.get("dataset", "digits"))
    is_path = given != "digits" and Path(given).expanduser().exists()
    copied = named is not None and ((is_path and named != "digits") or "dataset" not in shared)
    dataset = str(named) if copied else given  # a folder is taken for a copy of what a file names
    return Arm(own, own, path, {**settings, **shared}, shared, dataset)


def _note_of(folder: Path) -> Path:
    """Return the file that notes the settings that a run was begun with."""
    return folder.with_name(f"{folder.name}.arm.yaml")


def _made_by_another(folders: Sequence[Path]) -> list[Path]:
    """Return the folders of runs that another train.py made than there is now."""
    now, copies = SCRIPT.read_bytes(), {folder: folder / SCRIPT.name for folder in folders}
    return [folder for folder, copy in copies.items() if copy.exists() and copy.read_bytes() != now]


def _check_same(arm: Arm, folder: Path) -> None:
    note = _note_of(folder)
    if not folder.exists():
        return
    if not note.exists():
        raise SettingError(f"runs_dir must have only runs of comparisons, got {folder}")
    made = parse.read_settings(note)
    before, now = _alike(made), _alike(arm.settings)
    for key in sorted({*now, *before}):
        if before.get(key) != now.get(key):
            raise SettingError(
                f"{key} of arm {arm.name} must be {as_given(made.get(key))} as in {note}, or "
                f"runs_dir another, got {as_given(arm.settings.get(key))}; remove {folder} to run "
                "it again"
            )


def _alike(settings: Mapping[str, Any]) -> dict[str, list[float | str]]:
    """Return the settings that move results, alike however a file or a flag writes them."""
    found = {}
    for name, value in settings.items():
        if name not in _FREE and value is not None:
            parts = value if isinstance(value, list) else str(value).split(",")
            found[name] = [_as_number(str(part).strip()) for part in parts]
    return found


def _as_number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text.lower()
