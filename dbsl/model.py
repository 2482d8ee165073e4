"""timm models for a run: a stem for small images, dropout by stage, files that load back."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import nn

from dbsl.base.errors import SettingError, require, such_as, words_of
from dbsl.base.files import write_bytes, write_with
from dbsl.base.machine import hub_or_cache, lazy_import
from dbsl.base.seeds import stream_seed
from dbsl.config.settings import RunConfig
from dbsl.data.dataset import Data, Statistics
from dbsl.data.sources import TrainingData

huggingface_hub, timm = lazy_import("huggingface_hub"), lazy_import("timm")

SMALL_STEM_UP_TO = 64  # pixels: a stem that divides the side by 4 leaves too little of such images
FINAL, EMA, BEST = "model", "model_ema", "model_best"
# What timm says of its weights for an architecture; it is not true of new weights.
_OF_PUBLISHED_WEIGHTS = ("license", "description", "origin_url", "paper_name", "paper_ids", "notes")
_MARK = 0.123456789  # a dropout probability that no model uses


def build_model(
    name: str,
    num_classes: int,
    resolutions: Sequence[int],
    *,
    pretrained: bool = False,
    seed: int = 0,
    say: Callable[[str], object] = print,
    settings: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Return a timm model that takes images of several resolutions, in pixels, small ones included.

    If the last is up to 64 px, a ResNet gets a 3x3 stride-1 stem. A transformer then gets patches
    of at most an eighth of the side that divide all resolutions. Transformers (timm's with
    ``dynamic_img_size``: ViT, DeiT, EVA, Swin) resample their position embeddings to each.

    Weights trained elsewhere are kept where they fit. The classifier is new if the number of
    classes differs, and a ResNet's stem if images are small and the weights' stem is not. The
    model's ``input_statistics`` are what its weights were trained with; None: they are new.

    `name` is in timm's registry, ``local-dir:FOLDER`` or ``hf-hub:USER/NAME``. `say` takes a line
    for each unused part of the weights; `settings` are more arguments of the model.
    """
    from_elsewhere = pretrained or ":" in name
    reading = _reading_weights(name) if from_elsewhere else nullcontext()
    with torch.random.fork_rng(devices=[]), reading:
        small_stem = _has_small_stem(name)
        # The mark identifies the classifier's dropout modules.
        model = _create(
            name,
            resolutions,
            stream_seed(seed, "initial weights"),
            pretrained=from_elsewhere and not small_stem,
            num_classes=num_classes,
            drop_rate=_MARK,
            settings=settings or {},
        )
        is_small = small_stem or resolutions[-1] <= SMALL_STEM_UP_TO
        model.small_stem = is_small and _shrink_stem(model)
        if small_stem:
            timm.models.load_pretrained(model, num_classes=num_classes)
    model.input_statistics, model.named_weights = None, from_elsewhere
    if from_elsewhere:
        model.input_statistics = _statistics(model.pretrained_cfg, f"of {name}")
        before = model.pretrained_cfg["num_classes"]
        if before != num_classes:
            say(f"the classifier is new: {num_classes} classes in the data, {before} in {name}")
        if model.small_stem and not small_stem:
            say(
                f"warning: the stem is new, for images of up to {SMALL_STEM_UP_TO} px: {name} has "
                "weights for a 7x7 stem (resolutions above keep it)"
            )
    for module in model.modules():
        if type(module) is nn.Conv2d and module.stride[1] > 1:
            module.__class__ = StridedConv2d
    model.head_dropouts = [m for m in model.modules() if isinstance(m, nn.Dropout) and m.p == _MARK]
    set_dropout(model, 0.0)
    return model


def create_model(config: RunConfig, num_classes: int, resolutions: Sequence[int]) -> nn.Module:
    """Return the model that the settings describe, with its initial weights; see `build_model`."""
    model = build_model(
        config.model,
        num_classes,
        resolutions,
        pretrained=config.pretrained,
        seed=config.seed,
        say=PartialState().print,
        settings=config.model_settings,
    )
    if config.initial_checkpoint is not None:
        load_initial(model, config.initial_checkpoint, PartialState().print)
    if config.grad_checkpointing:
        try:
            model.set_grad_checkpointing()
        except (AttributeError, AssertionError):
            must = "grad_checkpointing must be false with a model that does not know it"
            raise SettingError(f"{must}, got {config.model}") from None
        count_once(model)
    return model


def _create(
    name: str, resolutions: Sequence[int], seed: int, settings: Mapping[str, Any], **args: Any
) -> nn.Module:
    """Create a model by name, with arguments that only Vision Transformers take or without."""
    if not (":" in name or timm.is_model(name)):
        near = such_as(name, timm.list_models())
        raise SettingError(
            f"model must be a name that timm.list_models() knows{near}, got {name!r}"
        )
    transformer_args: dict[str, Any] = {"img_size": resolutions[-1], "dynamic_img_size": True}
    if resolutions[-1] <= SMALL_STEM_UP_TO:  # patches of 16 px would leave 4 of 32 px
        common, most = math.gcd(*resolutions), max(1, resolutions[-1] // 8)
        sides = (side for side in range(1, most + 1) if common % side == 0)
        transformer_args["patch_size"] = max(sides)
    for more in (transformer_args, {}):
        torch.manual_seed(seed)
        try:
            model = timm.create_model(name, **{**more, **args, **settings})
        except Exception as error:  # not such a model; its settings may raise anything
            failed = error
            continue
        if not more or getattr(model, "dynamic_img_size", False):
            model.created_with, model.settings = more, dict(settings)
            return model
        del model  # before there are two models
    if not settings or isinstance(failed, OSError):  # weights that cannot be read
        raise failed
    given = ", ".join(f"{key}={value}" for key, value in settings.items())
    raise SettingError(
        f"model must take the settings that are given, got {name} with {given} ({words_of(failed)})"
    )


def _shrink_stem(model: nn.Module) -> bool:
    """Replace a ResNet's 7x7 stride-2 stem and its pooling; return whether there was one."""
    conv, pool = getattr(model, "conv1", None), getattr(model, "maxpool", None)
    if not isinstance(conv, nn.Conv2d) or conv.kernel_size != (7, 7) or pool is None:
        return False
    model.conv1 = nn.Conv2d(conv.in_channels, conv.out_channels, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")  # as timm does
    model.maxpool = nn.Identity()
    return True


class StridedConv2d(nn.Conv2d):
    """A convolution with a correct gradient even for images narrower than its stride.

    In bfloat16 on the CPU, torch's (2.11 to 2.15, oneDNN) then leaves uninitialised memory in its
    weights' gradient, as in a ResNet's last stage at 16 px. Such cases run in float32.
    """

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """See `torch.nn.Conv2d`."""
        if images.device.type == "cpu" and images.shape[-1] < self.stride[1]:
            with torch.autocast("cpu", enabled=False):
                return super().forward(images.to(self.weight.dtype))
        return super().forward(images)


def load_initial(model: nn.Module, file: str, say: Callable[[str], object]) -> None:
    """Load a file's weights into a model from `build_model`, and set its ``input_statistics``.

    The classifier and stem may be missing or of another shape. The statistics come from the
    ``config.json`` next to the file if its architecture is the same, else from timm.
    """
    try:
        Path(file).open("rb").close()  # timm would report a missing file itself
        state = timm.models.load_state_dict(file)
        adapt = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
        state = adapt(state, model) if adapt else state
    except Exception as error:  # whatever torch and safetensors raise
        raise SettingError(
            f"initial_checkpoint must be a file of weights, got {file} ({words_of(error)})"
        ) from None
    wanted, config = model.state_dict(), model.pretrained_cfg
    heads = config.get("classifier") or ()
    may_be_new = tuple(f"{h}." for h in ([heads] if isinstance(heads, str) else heads))
    may_be_new += ("conv1.",) if model.small_stem else ()
    unlike = [n for n in wanted if n not in state or state[n].shape != wanted[n].shape]
    unlike += [name for name in state if name not in wanted]
    bad = [name for name in unlike if not name.startswith(may_be_new)]
    got = f"{file}, which differs in {len(bad)} of them, such as {bad[:1]}"
    require(not bad, "initial_checkpoint must have the weights of the model", got)
    model.load_state_dict({n: v for n, v in state.items() if n not in unlike}, strict=False)
    if unlike:
        say(f"new, as {file} has none that fit: {', '.join(n for n in unlike if n in wanted)}")
    source = f"timm's of {config['architecture']}, without a config.json of it next to {file}"
    with suppress(SettingError):  # none, or another program's
        saved = read_model_config(Path(file).parent)
        if saved["architecture"] == config["architecture"]:
            config, source = saved["pretrained_cfg"], f"of {Path(file).with_name('config.json')}"
    model.input_statistics = _statistics(config, source)


def _statistics(pretrained_cfg: Mapping[str, Any], source: str) -> Statistics:
    found = timm.data.resolve_data_config(pretrained_cfg=dict(pretrained_cfg))
    return Statistics(tuple(found["mean"]), tuple(found["std"]), source)


def _has_small_stem(name: str) -> bool:
    """Whether weights are those of a ResNet with a stem that `build_model` replaced."""
    source, elsewhere, place = name.partition(":")
    if not elsewhere:
        return False
    if source == "local-dir":
        file = Path(place).expanduser() / "config.json"
    else:
        repo_id, _, revision = place.partition("@")
        file = huggingface_hub.hf_hub_download(repo_id, "config.json", revision=revision or None)
    return bool(json.loads(Path(file).read_text(encoding="utf-8")).get("small_stem"))


@contextmanager
def _reading_weights(name: str) -> Iterator[None]:
    """Report any failure to read weights from elsewhere in one line, without retries."""
    with nullcontext(True) if name.startswith("local-dir:") else hub_or_cache() as answers:
        try:
            yield
        except SettingError:
            raise
        except Exception as error:  # network, hub, file or weights: many types
            reason = words_of(error, 300)
            if not answers and isinstance(error, OSError):
                reason = "the hub cannot be reached and its cache does not have them"
            setting = "model must name" if ":" in name else "pretrained must go with a model of"
            raise SettingError(
                f"{setting} weights that can be read, got {name!r} ({reason})"
            ) from None


@torch.no_grad()
def check_model(model: nn.Module, data: TrainingData, name: str, sides: Sequence[int]) -> int:
    """Return the fewest samples that a model can train on; refuse one that cannot train here.

    It is 2 where batch norm sees one value per sample: a ResNet's last maps are 1x1 pixel at 8 px,
    and a single value has no variance. Images of each side must divide into a transformer's
    patches, and fit into memory. A model of your own may return several tensors, which the
    loss function and `evaluate` take apart.
    """
    trained = any(parameter.requires_grad for parameter in model.parameters())
    require(trained, "model must have parameters to train", f"{name} without any")
    norms = [*batch_norms(model)]
    cumulative = any(n.momentum is None and n.track_running_stats for n in norms)
    text = "model must have batch norm whose statistics have a momentum, and can be merged"
    require(not cumulative, text, "momentum=None")
    lone, training, is_own = set(), model.training, not hasattr(model, "created_with")

    def look(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        lone.add(inputs[0].numel() == inputs[0].shape[0] * inputs[0].shape[1])

    hooks = [norm.register_forward_pre_hook(look) for norm in norms]
    for side in sides:
        try:
            inputs, _ = data.example(2, side)
            scores = model.eval()(inputs)
        except Exception as error:  # any of timm's code may raise
            if is_own:  # the traceback shows its fault
                raise
            raise SettingError(
                f"model must take images of {side} px, got {name} ({words_of(error)})"
            ) from None
        is_tensor, wanted = isinstance(scores, torch.Tensor), [len(inputs), data.num_classes]
        shape = list(scores.shape) if is_tensor else type(scores).__name__
        must = f"model must give scores of the data's {data.num_classes} classes, {wanted} for "
        right = shape == wanted or (is_own and not is_tensor)
        require(right, f"{must}inputs {list(inputs.shape)}", f"{shape} of {name}")
    model.train(training)
    for hook in hooks:
        hook.remove()
    return 2 if True in lone else 1


def batch_norms(model: nn.Module) -> Iterator[nn.Module]:
    """Return a model's batch norm layers."""
    return (m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))


def count_once(model: nn.Module) -> None:
    """Keep batch norm's running statistics unchanged when a backward pass recomputes it."""

    def again(norm: nn.Module) -> bool:
        return norm.training and torch._C._current_graph_task_id() >= 0

    def begin(norm: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling():  # compiled code counts once
            return
        norm.kept_momentum = norm.momentum
        norm.momentum = 0.0 if again(norm) else norm.momentum

    def end(norm: nn.Module, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        norm.momentum = norm.kept_momentum
        if norm.num_batches_tracked is not None:
            norm.num_batches_tracked.sub_(int(again(norm)))

    for norm in batch_norms(model):
        norm.register_forward_pre_hook(begin)
        norm.register_forward_hook(end, always_call=True)  # recomputing stops early


def has_batch_norm(model: nn.Module) -> bool:
    """Whether the model has batch norm layers that are not frozen."""
    return any(all(p.requires_grad for p in norm.parameters()) for norm in batch_norms(model))


def train_mode(model: nn.Module, dropout: float) -> None:
    """Put a model into training mode, with this dropout before the classifier.

    Modules with all parameters frozen remain in evaluation mode; a model that `create_model` did
    not make keeps its own dropout.
    """
    set_dropout(model, dropout)
    set_training(model)


def set_training(model: nn.Module) -> None:
    """Put a model into training mode, except modules with all parameters frozen.

    In evaluation mode, their batch norm keeps its statistics and their dropout is off.
    """
    modules = list(model.modules())
    if not all(module.training for module in modules):  # else it takes long, without effect
        model.train()
    held = [p for module in modules for p in module._parameters.values() if p is not None]
    if all(parameter.requires_grad for parameter in held):
        return
    for module in modules:
        trained = [parameter.requires_grad for parameter in module.parameters()]
        if trained and not any(trained):
            module.eval()


def set_dropout(model: nn.Module, probability: float) -> None:
    """Set the dropout before the classifier; a model not built here keeps its own."""
    if not hasattr(model, "head_dropouts"):
        return
    model.drop_rate = probability  # read at every forward pass where timm applies it as a function
    for module in model.head_dropouts:
        module.p = probability


def save_model(
    model: nn.Module, folder: Path, resolution: int, data: Data, *, name: str = FINAL
) -> None:
    """Write ``model.safetensors`` and timm's ``config.json``, each whole or not at all.

    For your own model, only weights are written. `resolution` is the image side, in pixels, that it
    is meant for.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Clone: the model's tensors are views into one vector, and safetensors refuses views.
    tensors = {n: t.detach().cpu().contiguous().clone() for n, t in model.state_dict().items()}
    weights = save(tensors, metadata={"format": "pt"})
    # Not save_file: its errors do not distinguish a full disk from others.
    write_weights = partial(write_bytes, folder / f"{name}.safetensors", weights)
    if not hasattr(model, "created_with"):
        write_weights()
        return
    size = (3, resolution, resolution)
    preprocessing = {
        "input_size": size,
        "test_input_size": size,
        "interpolation": data.interpolation,
        "mean": data.mean,
        "std": data.std,
        "crop_pct": data.crop_pct,
        "test_crop_pct": data.crop_pct,
        "crop_mode": "center",
        "tag": "",
        **({} if model.named_weights else dict.fromkeys(_OF_PUBLISHED_WEIGHTS)),
    }
    config = {
        "label_names": list(data.class_names),
        "small_stem": model.small_stem,
        "pretrained_cfg": preprocessing,
    }
    args = {"drop_rate": 0.0, **model.created_with, **model.settings}

    def write_both(temporary: Path) -> None:
        timm.models._hub.save_config_for_hf(model, temporary, model_config=config, model_args=args)
        write_weights()

    write_with(folder / "config.json", write_both)


def load_model(folder: str | Path, *, ema: bool = False, best: bool = False) -> nn.Module:
    """Return the model of a run folder or checkpoint, in evaluation mode on the CPU.

    With `ema` it has the weights averaged over epochs (``--ema-decay``), with `best` those of the
    evaluation with the best accuracy.
    """
    folder, name = Path(folder), EMA if ema else BEST if best else FINAL
    config = read_model_config(folder)
    args = {**config.get("model_args", {}), "num_classes": config["num_classes"]}
    try:
        model = timm.create_model(config["architecture"], **args)
        if config.get("small_stem"):
            _shrink_stem(model)
        model.load_state_dict(load_file(folder / f"{name}.safetensors"))
        model.pretrained_cfg = {**model.pretrained_cfg, **config["pretrained_cfg"]}
    except (OSError, KeyError, RuntimeError, SafetensorError) as error:
        text = f"folder must hold {name}.safetensors, got {folder} ({words_of(error)})"
        raise SettingError(text) from None
    return model.eval()


def read_model_config(folder: str | Path) -> dict[str, Any]:
    """Return timm's config of the model in a folder: architecture, classes, preprocessing."""
    path = Path(folder) / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        _, _, classes = config["architecture"], config["pretrained_cfg"], config["num_classes"]
        if len(config["label_names"]) != classes:
            raise ValueError(f"{path} must have label_names for its {classes} classes")
    except (OSError, ValueError, TypeError, KeyError) as error:  # another program's
        text = f"folder must hold config.json, got {folder} ({words_of(error)})"
        raise SettingError(text) from None
    return config
