"""Stages that train: the paper's arms and this project's recipe, one seed of one arm each.

Short runs make do with what there is of the images, and say how many; full ones need all of them.

A stage has to fit into one call. ResNet-18's weights alone are 45 MB, more than what a call may
bring back in a file, so that an unfinished run can only be taken up where it lies: on a machine
that is still held. It saves every two minutes and shortly before its time is up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.benchmarks.gpu.child import Settings
from experiments.benchmarks.gpu.data import images_in
from experiments.benchmarks.gpu.runner import ROOT, read_results
from experiments.benchmarks.gpu.runs import peak_memory, results_of, train_here

# On held-out images; a best rate at an end asks for the next.
RATES = {"all_large": (0.1, 0.2, 0.4, 0.8, 1.6, 3.2), "dual": (0.2, 0.4, 0.8, 1.6)}
TUNED_ON_SEED, HELD_OUT = 100, 0.1
_SAVE_S = 25.0  # before the end of a stage, for a save


def train_arm(
    settings: Settings,
    config: str,
    seed: int,
    epochs: int | None = None,
    flags: Sequence[str] = (),
    rate_from: Sequence[str] = (),
) -> Iterator[dict[str, Any]]:
    """Train one arm with one seed, from where it was stopped if it lies in the work folder.

    Args:
        settings: What all stages get to know.
        config: File in configs/.
        seed: Seed of the run.
        epochs: Length of the run if it is not the config's; milestones move with it.
        flags: More flags of train.py.
        rate_from: Stages of which the one with the best accuracy gives the learning rate.
    """
    from dbsl.base.errors import RunStopped

    if rate_from:
        flags = [*flags, "--lr", f"{best_rate(settings, rate_from):g}"]
        yield {"flags": flags}
    name = f"{Path(config).parent.name}-{Path(config).stem}-{epochs or 'full'}-seed{seed}"
    folder = Path(settings.work) / "-".join([name, *(flag.lstrip("-") for flag in flags)])
    own = arm_flags(settings, config, seed, epochs, flags)
    own += ["--output-dir", str(folder), "--resume", "auto", "--checkpoint-every", "2m"]
    minutes = max(settings.limit_s - _SAVE_S, settings.limit_s / 2) / 60
    lacking = images_in(settings.data)
    yield {"config": config, "seed": seed, **lacking}
    if lacking and needs_all_images({"config": config, "epochs": epochs}) and not settings.dry:
        raise RuntimeError(f"a full run needs all pieces of the images, got {lacking}")
    try:
        train_here([*own, "--max-minutes", f"{minutes:.2f}"])
    except RunStopped as stopped:
        yield results_of(folder)
        raise TimeoutError(f"stopped before its last epoch, to be taken up: {stopped}") from None
    found = results_of(folder)
    yield {**found, "final_accuracy": found["accuracy"][-1], **peak_memory()}
    if not found["finite"]:
        raise RuntimeError(f"losses are not finite: {found['train_loss']}")


def arm_flags(
    settings: Settings, config: str, seed: int, epochs: int | None, flags: Sequence[str]
) -> list[str]:
    """Return the flags that say what is trained; see `train_arm`."""
    own = ["--config", str(ROOT / config), "--seed", str(seed), "--report-to", "none"]
    own += ["--dataset", settings.data, *flags]
    own += scaled_epochs(own, 2 if settings.dry else epochs)
    if settings.dry:
        own += ["--label-column", "label"] if settings.data == "digits" else []
        own += ["--model", "test_resnet", "--train-samples", "240", "--eval-samples", "40"]
        own += ["--resolutions", "16,24", "--large-batch-size", "8", "--cpu-threads", "1"]
        own += ["--slope", "0.001", "--intercept", "0.01", "--rounds-per-epoch", "1"]
        own += ["--local-batch-sizes", "8,8,8,8"] if "ddp" in config else []
    return own


def needs_all_images(arguments: Mapping[str, Any]) -> bool:
    """Whether a stage with these arguments is a training run of full length."""
    return "config" in arguments and arguments.get("epochs") is None


def scaled_epochs(flags: Sequence[str], epochs: int | None) -> list[str]:
    """Return flags that make a run so many epochs long, milestones and warm-up in proportion."""
    import train
    from dbsl.config.parse import parse_config

    if epochs is None:
        return []
    config = parse_config(train.Config, list(flags))
    scale = epochs / config.epochs
    found = ["--epochs", str(epochs)]
    if config.lr_milestones:
        places = sorted({max(1, round(scale * epoch)) for epoch in config.lr_milestones})
        found += ["--lr-milestones", *(str(place) for place in places if place < epochs)]
    if config.warmup_epochs:
        found += ["--warmup-epochs", f"{scale * config.warmup_epochs:.3g}"]
    return found


def best_rate(settings: Settings, stages: Sequence[str]) -> float:
    """Return the learning rate of the finished stage with the best accuracy."""
    finished = {
        line["stage"]: line["figures"]
        for line in read_results(Path(path) for path in settings.results)
        if line["status"] == "ok" and line["stage"] in stages
        if bool(line.get("dry")) == settings.dry
    }
    best = max(finished, key=lambda name: finished[name]["final_accuracy"])
    return float(best.rpartition("lr")[2])
