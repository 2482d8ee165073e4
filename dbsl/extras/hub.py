"""A run on the Hugging Face hub: its model card, and the upload of model, card and figures."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from accelerate import Accelerator

import dbsl
from dbsl.base.errors import SettingError, in_line, px
from dbsl.base.files import write_text
from dbsl.base.machine import lazy_import
from dbsl.cluster.wire import refused_by_all
from dbsl.config.fields import Excludes, Role
from dbsl.config.hooks import Extra, found_extras
from dbsl.config.settings import RunConfig
from dbsl.log.rows import no_result, read_metrics
from dbsl.run.folder import RESULTS, settings_in

huggingface_hub, timm = lazy_import("huggingface_hub"), lazy_import("timm")

CARD = "README.md"
_LOAD = """To read the model (`timm.create_model('local-dir:{name}', pretrained=True)` works too, \
except for a ResNet up to 64 px, whose 3x3 stem only `load_model` knows):

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
_ACCURACIES = {
    "final_accuracy": "accuracy, last epoch",
    "final_ema_accuracy": "accuracy of averaged weights (`model_ema.safetensors`)",
    "final_top5_accuracy": "top-5 accuracy, last epoch",
}
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class HubSettings(RunConfig):
    """Whether a finished run goes to the hub."""

    # --- run
    # repository user/name on the hub for model, card and figures of the finished run
    push_to_hub: Annotated[str | None, Role.FREE | Role.COMMAND, Excludes("eval_only")] = None


class Hub(Extra):
    """Writes a card for every run, and pushes those that are to be pushed."""

    Settings = HubSettings

    def check(self, config: HubSettings, accelerator: Accelerator) -> None:
        """Make the repository, unless it is there, or refuse on every process."""
        repo_id = config.push_to_hub
        if repo_id is None or config.plan_only:
            return
        with refused_by_all(accelerator):
            if accelerator.is_main_process:
                try:
                    hub = huggingface_hub.HfApi()
                    user = hub.whoami()
                    own = [user["name"], *(group["name"] for group in user.get("orgs", ()))]
                    if "/" in repo_id and repo_id.partition("/")[0] not in own:
                        raise SettingError(f"this user writes to {', '.join(own)}")
                    hub.create_repo(repo_id, exist_ok=True)
                except Exception as reason:  # network, hub or name: many types
                    raise SettingError(
                        f"push_to_hub must be a repository that can be created, got {repo_id} "
                        f"({in_line(reason)})"
                    ) from reason

    def end(self, folder: Path) -> None:
        """Write the card; of a run without a result none, nor that of before it was made longer."""
        values = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        if no_result(values) is not None:
            (folder / CARD).unlink(missing_ok=True)
            return
        settings, of_timm = settings_in(folder), (folder / "config.json").exists()
        data = huggingface_hub.ModelCardData(**_metadata(folder.name, settings, values, of_timm))
        text = f"---\n{data.to_yaml()}\n---\n\n{_body(folder, settings, values, of_timm)}"
        write_text(folder / CARD, text)

    def finished(self, config: HubSettings, folder: Path, accelerator: Accelerator) -> None:
        """Upload the run; if that fails, the folder stays as it was."""
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
                f"push_to_hub failed for {repo_id} ({in_line(reason)}); the run is whole in "
                f"{folder}; to try again: --resume {folder} --push-to-hub {repo_id}"
            ) from reason
        accelerator.print(f"pushed: {done.commit_url}")


def _metadata(
    name: str, settings: Mapping[str, Any], values: Mapping[str, Any], of_timm: bool
) -> dict[str, Any]:
    task = "image-classification" if settings["resolutions"][-1] else None
    dataset = settings["dataset"]
    on_hub = bool(_HUB_ID.fullmatch(dataset)) and not Path(dataset).exists()
    data_name = dataset if on_hub else Path(dataset).name
    result = huggingface_hub.EvalResult(
        task_type=task or "other",
        dataset_type=data_name,
        dataset_name=data_name,
        metric_type="accuracy",
        metric_name="accuracy at the last epoch",
        metric_value=values["final_accuracy"],
    )
    source, colon, place = settings["model"].partition(":")
    base = None  # the hub's name of the weights that the run has started from
    if colon:
        base = place.partition("@")[0] if source == "hf-hub" else None
    elif settings.get("pretrained", False):
        base = timm.get_pretrained_cfg(source).hf_hub_id or None
    dual = ["dual-batch-learning"] if values["workers"] > 1 else []
    return {
        "library_name": "timm" if of_timm else "pytorch",
        "pipeline_tag": task,
        "tags": [*[task] * bool(task), *["timm"] * of_timm, "dbsl", *dual],
        "datasets": [dataset] if on_hub else None,
        "base_model": base,
        "model_name": name,
        "eval_results": [result],
    }


def _body(
    folder: Path, settings: Mapping[str, Any], values: Mapping[str, Any], of_timm: bool
) -> str:
    several = values["workers"] > 1
    small = f"{values['workers']}, {values['small_workers']}"
    of_workers = {"workers, of them on small batches": small}
    of_workers["how workers meet, what they send"] = f"{values['sync']}, {settings['wire']}"
    results = {
        **{text: f"{100 * values[n]:.2f} %" for n, text in _ACCURACIES.items() if n in values},
        "cross-entropy, last epoch": f"{values['final_loss']:.4f}",
        "epochs, samples trained on": f"{values['epochs']}, {values['samples_seen']}",
        "training, evaluation left out": f"{values['train_time_s']:.1f} s",
        **(of_workers if several else {}),
        "seed": values["seed"],
        "device, precision": f"{values['device']}, {values['precision']}",
        "torch, timm": f"{values['torch']}, {values['timm']}",
    }
    batches: dict[str, str] = {}  # by each resolution's first plan
    for row in read_metrics(folder / "metrics.jsonl"):
        if row["event"] == "plan":
            counts = Counter(worker["local_batch_size"] for worker in row["workers"])
            each = [f"{n} x {size}" if several else f"{size}" for size, n in counts.items()]
            batches.setdefault(px(row["resolution"]) or "all", ", ".join(each))
    model, side = settings["model"], px(settings["resolutions"][-1], " for ", " images")
    planned = " on each worker, as planned (`plan.json`)" * several
    code = found_extras().get("code")
    by = f"by {code.in_words(folder)}, " if code else ""
    load = (_LOAD if of_timm else _LOAD_OWN).format(name=folder.name, model=model)
    return f"""# {folder.name}

A {"timm " * of_timm}`{model}`{side}, trained on `{settings["dataset"]}`.

| one run, no mean over seeds | |
|---|---|
{_rows(results)}
| resolution | samples a step{planned} |
|---|---|
{_rows(batches)}
{load}
Trained {by}with dbsl {dbsl.__version__} and the settings in `config.yaml`.
"""


def _rows(values: Mapping[str, Any]) -> str:
    return "".join(f"| {name} | {value} |\n" for name, value in values.items())
