from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from dbsl.base.errors import SettingError
from dbsl.config.settings import RunConfig
from dbsl.model import build_model, load_initial, load_model, save_model
from dbsl.run.prepare import prepare
from tests.helpers import TINY
from train import Config

DATA = SimpleNamespace(
    class_names=("a", "b"), mean=(0.5,) * 3, std=(0.2,) * 3, crop_pct=1.0, interpolation="bilinear"
)


def test_settings_of_a_model_are_timms_and_come_back_with_it(tmp_path):
    kwargs = ("drop_path_rate=0.2", "init_values=0.1", "global_pool=avg")
    config = RunConfig(model_kwargs=kwargs)
    model = build_model("test_vit", 2, (32,), settings=config.model_settings)
    assert [round(float(b.drop_path1.drop_prob), 3) for b in model.blocks[1:]][-1] == 0.2
    assert model.blocks[0].ls1.gamma[0] == 0.1
    save_model(model, tmp_path, 32, DATA)
    again = load_model(tmp_path)
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(again(images), model.eval()(images))


def test_settings_that_a_model_does_not_take_are_refused():
    near = "model_kwargs must name arguments such as drop_block_rate, .*, got drop_block$"
    with pytest.raises(ValueError, match=near):
        build_model("test_resnet", 2, (32,), settings={"drop_block": 1})
    with pytest.raises(ValueError, match="initial_checkpoint must be unset with pretrained"):
        RunConfig(initial_checkpoint="x", pretrained=True)


@pytest.mark.parametrize(
    ("setting", "argument", "message"),
    [
        ("model_kwargs", "num_classes=3", "must leave num_classes to the data"),
        ("model_kwargs", "in_chans=1", "must leave in_chans to the data"),
        ("model_kwargs", "pretrained=True", "must leave pretrained to pretrained"),
        ("model_kwargs", "drop_path_rate=1", r"drop_path_rate must be in \[0, 1\), got 1"),
        ("opt_kwargs", "layer_decay=2", r"layer_decay must be in \(0, 1\], got 2"),
        ("opt_kwargs", "layer_decay=a", "must have a number as layer_decay, got 'a'"),
    ],
)
def test_an_argument_that_is_another_setting_or_beyond_its_bounds_is_refused(
    setting, argument, message
):
    config = RunConfig(**{setting: (argument,)})
    with pytest.raises(SettingError, match=f"^{setting} {message}$"):
        _ = config.optimizer_settings, config.model_settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_kwargs": ("block=1",)}, "take the settings .* with block=1"),
        ({"model_kwargs": ("features_only=True",)}, "10 classes, .2, 10. for .*, got list of"),
        ({"model_kwargs": ("global_pool=",)}, "take images of 16 px, got test_resnet .addmm"),
        ({"model": "convnext_atto"}, "take images of 16 px, got convnext_atto .Calculated"),
    ],
)
def test_a_model_that_has_no_score_for_each_class_is_refused(accelerator, settings, message):
    with pytest.raises(SettingError, match=f"^model must .*{message}"):
        prepare(Config(**{**TINY, **settings}), accelerator, loss_function=None)


@pytest.mark.parametrize("classes", [2, 5])
@pytest.mark.parametrize("kind", ["safetensors", "pth"])
@pytest.mark.parametrize("name", ["test_resnet", "test_vit"])
def test_a_model_starts_from_a_file_and_says_what_is_new(tmp_path, caplog, name, kind, classes):
    source = build_model(name, 2, (32,), seed=5)
    file, told = str(tmp_path / f"weights.{kind}"), []
    (save_file if kind == "safetensors" else torch.save)(source.state_dict(), file)
    model = build_model(name, classes, (32,), seed=6)
    load_initial(model, file, told.append)
    differ = [
        n
        for n, value in model.state_dict().items()
        if value.shape != source.state_dict()[n].shape
        or not torch.equal(value, source.state_dict()[n])
    ]
    assert all(n.startswith(model.pretrained_cfg["classifier"]) for n in differ)
    assert bool(differ) == bool(told) == (classes == 5)
    other = "test_vit" if name == "test_resnet" else "test_resnet"
    model = build_model(other, 2, (32,))
    with pytest.raises(ValueError, match="initial_checkpoint must have the weights of the model"):
        load_initial(model, file, told.append)
    with pytest.raises(ValueError, match="initial_checkpoint must be a file of weights, got none"):
        load_initial(model, "none", told.append)
    assert not caplog.records  # timm would have its own say
