"""A run on the Hugging Face hub: its model card, and the upload of model, card and figures."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator

import dbsl
from dbsl.base.errors import SettingError, in_line
from dbsl.base.files import write_text
from dbsl.base.machine import lazy_import
from dbsl.base.words import px
from dbsl.cluster.wire import share_text
from dbsl.config.settings import RunConfig
from dbsl.plan.types import Plan
from dbsl.run.code import code_in_words
from dbsl.run.folder import RESULTS

huggingface_hub, timm = lazy_import("huggingface_hub"), lazy_import("timm")


CARD = "README.md"
_LOAD = """To read the model (up to 64 px a ResNet has a 3x3 stem, which `load_model` knows of; \
else `timm.create_model('local-dir:{name}', pretrained=True)` does, too):

```python
from dbsl.model import load_model

model = load_model("{name}")
```
"""
_LOAD_OWN = """To read the model, build `{model}` as the script that trained it does, then:

```python
from safetensors.torch import load_file

model.load_state_dict(load_file("{name}/model.safetensors"))
```
"""
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def check_hub(config: RunConfig, accelerator: Accelerator) -> None:
    """Make the repository that a run will be pushed to, unless it is there, before any training.

    Raises:
        SettingError: On every process, if it is not this user's to write to, or the hub cannot be
            reached.
    """
    repo_id, error = config.push_to_hub, ""
    if repo_id is None or config.plan_only:
        return
    if accelerator.is_main_process:
        try:
            hub = huggingface_hub.HfApi()
            user = hub.whoami()
            own = [user["name"], *(group["name"] for group in user.get("orgs", ()))]
            if "/" in repo_id and repo_id.partition("/")[0] not in own:
                raise SettingError(f"this user writes to {', '.join(own)}")
            hub.create_repo(repo_id, exist_ok=True)
        except Exception as reason:  # network, hub or name: many types
            error = (
                f"push_to_hub must be a repository that can be made, got {repo_id} "
                f"({in_line(reason)})"
            )
    if error := share_text(error, accelerator):
        raise SettingError(error)


def push_run(config: RunConfig, folder: Path, accelerator: Accelerator) -> None:
    """Upload a finished run's model, card, settings and figures, if it is to be pushed.

    Raises:
        SettingError: On the main process, if it fails; the folder is as it was.
    """
    repo_id = config.push_to_hub
    if repo_id is None or not accelerator.is_main_process:
        return
    try:
        done = huggingface_hub.HfApi().upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            allow_patterns=list(RESULTS),
            commit_message=f"Run {folder.name}",
        )
    except Exception as reason:
        raise SettingError(
            f"push_to_hub failed for {repo_id} ({in_line(reason)}); the run is whole in {folder}; "
            f"to try again: --resume {folder} --push-to-hub {repo_id}"
        ) from reason
    accelerator.print(f"pushed: {done.commit_url}")


def write_card(
    folder: Path,
    config: RunConfig,
    plans: Mapping[int, Plan],
    values: Mapping[str, Any],
    *,
    of_timm: bool = True,
) -> None:
    """Write the model card of a finished run, with its own figures from summary.json."""
    data = huggingface_hub.ModelCardData(**_metadata(folder, config, values, of_timm))
    text = f"---\n{data.to_yaml()}\n---\n\n{_body(folder, config, plans, values, of_timm)}"
    write_text(folder / CARD, text)


def _metadata(
    folder: Path, config: RunConfig, values: Mapping[str, Any], of_timm: bool
) -> dict[str, Any]:
    task = "image-classification" if config.resolutions[-1] else None
    on_hub = bool(_HUB_ID.fullmatch(config.dataset)) and not Path(config.dataset).exists()
    name = config.dataset if on_hub else Path(config.dataset).name
    result = huggingface_hub.EvalResult(
        task_type=task or "other",
        dataset_type=name,
        dataset_name=name,
        metric_type="accuracy",
        metric_name="accuracy at the last epoch",
        metric_value=values["final_accuracy"],
    )
    dual = ["dual-batch-learning"] if values["workers"] > 1 else []
    return {
        "library_name": "timm" if of_timm else "pytorch",
        "pipeline_tag": task,
        "tags": [*[task] * bool(task), *["timm"] * of_timm, "dbsl", *dual],
        "datasets": [config.dataset] if on_hub else None,
        "base_model": _base_model(config),
        "model_name": folder.name,
        "eval_results": [result],
    }


def _base_model(config: RunConfig) -> str | None:
    """Return the hub's name of the weights that a run has started from."""
    source, colon, place = config.model.partition(":")
    if colon:
        return place.partition("@")[0] if source == "hf-hub" else None
    return (timm.get_pretrained_cfg(config.model).hf_hub_id or None) if config.pretrained else None


def _body(
    folder: Path,
    config: RunConfig,
    plans: Mapping[int, Plan],
    values: Mapping[str, Any],
    of_timm: bool,
) -> str:
    alone = values["workers"] == 1
    of_workers = (
        ("workers, of them on small batches", f"{values['workers']}, {values['small_workers']}"),
        ("how workers meet", values["sync"]),
    )
    rows = [
        ("accuracy, last epoch", f"{values['final_accuracy']:.2%}".replace("%", " %")),
        ("cross-entropy, last epoch", f"{values['final_loss']:.4f}"),
        ("epochs, samples trained on", f"{values['epochs']}, {values['samples_seen']}"),
        ("training, evaluation left out", f"{values['train_time_s']:.1f} s"),
        *([] if alone else of_workers),
        ("seed", values["seed"]),
        ("device, precision", f"{values['device']}, {values['precision']}"),
        ("torch, timm", f"{values['torch']}, {values['timm']}"),
    ]
    if "final_ema_accuracy" in values:
        ema = f"{values['final_ema_accuracy']:.2%}".replace("%", " %")
        rows.insert(1, ("the same of averaged weights (`model_ema.safetensors`)", ema))
    if "final_top5_accuracy" in values:
        top5 = f"{values['final_top5_accuracy']:.2%}".replace("%", " %")
        rows.insert(1, ("top-5 accuracy, last epoch", top5))
    batches = "".join(f"| {px(r) or 'all'} | {_batches(plan)} |\n" for r, plan in plans.items())
    results = "".join(f"| {name} | {value} |\n" for name, value in rows)
    images = px(config.resolutions[-1], " for ", " images")
    how = "" if alone else " by workers with batch sizes of their own (dual-batch learning)"
    each = "" if alone else " on each worker, as planned (`plan.json`)"
    load = (_LOAD if of_timm else _LOAD_OWN).format(name=folder.name, model=config.model)
    return f"""# {folder.name}

A {"timm " * of_timm}`{config.model}`{images}, trained on `{config.dataset}`{how}.

| one run, no mean over seeds | |
|---|---|
{results}
| resolution | samples a step{each} |
|---|---|
{batches}
{load}
Trained by {code_in_words(folder)}, with dbsl {dbsl.__version__} and the settings in `config.yaml`.
"""


def _batches(plan: Plan) -> str:
    if len(plan.workers) == 1:
        return str(plan.workers[0].local_batch_size)
    counts = Counter(worker.local_batch_size for worker in plan.workers)
    return ", ".join(f"{count} x {size}" for size, count in counts.items())
