import json
import resource
import shutil
from types import SimpleNamespace

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn

import dbsl.model
from dbsl.base.errors import SettingError
from dbsl.cluster.weights import kept_modes
from dbsl.config.settings import RunConfig
from dbsl.model import (
    StridedConv2d,
    batch_norms,
    build_model,
    check_model,
    count_once,
    load_initial,
    load_model,
    save_model,
)
from dbsl.optimizer import create_optimizer
from tests.helpers import TINY, planned, refused
from train import Config

DATA = SimpleNamespace(class_names=("cat", "dog", "owl"), num_classes=3)
DATA.mean, DATA.std = (0.5, 0.4, 0.3), (0.2, 0.2, 0.2)
DATA.crop_pct, DATA.interpolation = 0.9, "bicubic"


def differing(one, other):
    """Return the names of weights that two models do not share."""
    mine, its = one.state_dict(), other.state_dict()
    return {name for name in mine if not torch.equal(mine[name], its[name])}


@pytest.mark.parametrize(("resolution", "stride", "side"), [(64, 1, 8), (65, 2, 3)])
def test_small_images_get_a_stem_that_keeps_their_side(resolution, stride, side):
    model = build_model("resnet18", 3, (resolution,))
    strided = [m for m in model.modules() if isinstance(m, nn.Conv2d) and m.stride[1] > 1]
    assert {type(module) for module in strided} == {StridedConv2d}
    assert model.conv1.stride == (stride, stride)
    features = model.eval().forward_features(torch.zeros(1, 3, resolution, resolution))
    assert features.shape == (1, 512, side, side)
    assert isinstance(model.maxpool, nn.Identity) == (stride == 1)


def test_weights_depend_on_the_seed_alone():
    def weights(seed):
        torch.manual_seed(torch.seed() % 1000)  # whatever the process drew before
        model = build_model("test_resnet", 3, (32,), seed=seed)
        return torch.cat([p.flatten() for p in model.parameters()])

    state = torch.get_rng_state()
    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))
    torch.set_rng_state(state)
    build_model("test_resnet", 3, (32,))
    assert torch.equal(torch.get_rng_state(), state)  # nor does it use up the process's stream


@pytest.mark.parametrize("name", ["test_resnet", "mobilenetv3_small_050", "test_convnext"])
def test_dropout_changes_without_rebuilding(name):
    model = build_model(name, 3, (32,))
    before = [p.data_ptr() for p in model.parameters()]
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))

    def outputs_differ(probability):
        dbsl.model.set_dropout(model, probability)
        model.train()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return not torch.equal(model(images), model(images))

    assert not outputs_differ(0.0)
    assert outputs_differ(0.5)
    assert not outputs_differ(0.0)
    assert [p.data_ptr() for p in model.parameters()] == before


def test_optimizer_leaves_biases_and_norms_out_of_weight_decay():
    model = build_model("test_resnet", 3, (32,))
    optimizer = create_optimizer("sgd", model, 0.1, 0.9, 0.01)
    assert optimizer.defaults["nesterov"]
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            assert group["weight_decay"] == (0.0 if parameter.ndim <= 1 else 0.01)
    assert create_optimizer("sgd", model, 0.1, 0.0, 0.01).defaults["momentum"] == 0.0


def test_a_model_that_the_disk_has_no_room_for_is_one_line_and_leaves_nothing(tmp_path, capsys):
    model = build_model("test_resnet", 3, (32,))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))  # bytes that a file may have
    try:
        line = refused(capsys, save_model, model, tmp_path, 32, DATA)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert line == "File too large: the run folder"
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("height", "width", "stride"), [(1, 1, 2), (4, 1, 2), (2, 2, 3), (1, 4, 2)]
)
@pytest.mark.parametrize("channels_last", [True, False])
def test_bf16_gradients_are_right_where_an_image_is_narrower_than_a_stride(
    height, width, stride, channels_last
):
    torch.manual_seed(0)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    conv = StridedConv2d(64, 64, 3, stride, padding=1).to(memory_format=layout)
    images = torch.randn(4, 64, height, width).to(memory_format=layout)
    (wanted,) = torch.autograd.grad(conv(images).sum(), conv.weight)
    for _ in range(5):  # which memory torch's own gradient would have read is up to chance
        rubbish = [torch.full((size,), float("nan")) for size in (100, 1000, 40_000)]
        del rubbish
        with torch.autocast("cpu", torch.bfloat16):
            output = conv(images).sum()
        (found,) = torch.autograd.grad(output, conv.weight)
        assert (found - wanted).norm() < 0.02 * wanted.norm()


def test_a_vision_transformer_takes_every_resolution_and_loads_back(tmp_path):
    model = build_model("test_vit", 3, (32,), seed=4).eval()
    assert model.patch_embed.patch_size == (4, 4)
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    small = nn.functional.interpolate(images, 24, mode="bilinear")
    outputs = [model(images), model(small)]
    save_model(model, tmp_path, 32, DATA)
    again = load_model(tmp_path)
    by_timm = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    for other in (again, by_timm):
        assert torch.equal(other(images), outputs[0])
        assert torch.equal(other(small), outputs[1])
    model.pos_embed.data.zero_()  # it is used at both
    assert not torch.allclose(model(images), outputs[0])
    assert not torch.allclose(model(small), outputs[1])


def test_patches_must_divide_every_resolution():
    model = build_model("test_vit", 3, (32,))
    data = SimpleNamespace(example=lambda n, side: (torch.zeros(n, 3, side, side), None))
    data.num_classes = 3
    check_model(model, data, "test_vit", (24, 32))
    message = r"must take images of 26 px, got test_vit .*divisible by patch size .4"
    with pytest.raises(ValueError, match=message):
        check_model(model, data, "test_vit", (26, 32))
    resnet = build_model("test_resnet", 3, (32,))
    check_model(resnet, data, "test_resnet", (26, 32))
    uneven = build_model("test_vit", 3, (16, 28))
    assert uneven.patch_embed.patch_size == (2, 2)  # 3, an eighth, divides neither
    large = build_model("test_vit", 3, (96,))
    assert large.patch_embed.patch_size == (16, 16)  # its own


@pytest.mark.parametrize(("before", "now", "stem_is_new"), [(32, 96, False), (96, 32, True)])
def test_a_run_starts_from_the_weights_of_another(tmp_path, before, now, stem_is_new):
    first = build_model("resnet18", 3, (before,), seed=3, settings={"layers": (1, 1, 1, 1)})
    save_model(first, tmp_path / "run", before, DATA)
    state = torch.get_rng_state()
    said = []
    name = f"local-dir:{tmp_path}/run"
    model = build_model(name, 3, (now,), seed=4, say=said.append)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.input_statistics == (DATA.mean, DATA.std, f"of {name}")
    assert differing(first, model) == ({"conv1.weight"} if stem_is_new else set())
    assert ["the stem is new" in line for line in said] == [True] * stem_is_new
    assert model.small_stem  # weights for a 3x3 stem keep it, also for larger images
    save_model(model, tmp_path / "again", now, DATA)
    images = torch.randn(2, 3, now, now)
    torch.testing.assert_close(load_model(tmp_path / "again")(images), model.eval()(images))


@pytest.mark.parametrize("name", ["test_resnet", "test_vit"])
def test_weights_for_other_classes_get_a_new_classifier_and_that_is_said(tmp_path, name):
    first = build_model(name, 3, (32,), seed=3)
    save_model(first, tmp_path, 32, DATA)
    said = []
    model = build_model(f"local-dir:{tmp_path}", 5, (32,), say=said.append)
    assert said == [f"the classifier is new: 5 classes in the data, 3 in local-dir:{tmp_path}"]
    heads = {key for key in first.state_dict() if key.startswith(("fc.", "head."))}
    assert differing(first, model) == heads
    assert model.num_classes == 5


def test_weights_normalise_as_the_config_beside_them_says_else_as_timm(tmp_path, accelerator):
    for folder, name in (("run", "test_vit"), ("other", "test_resnet")):
        save_model(build_model(name, 3, (16,)), tmp_path / folder, 16, DATA)
    (tmp_path / "alone").mkdir()
    files = [str(tmp_path / name / "model.safetensors") for name in ("run", "alone", "other")]
    for file in files[1:]:  # the other's config.json is of another architecture
        shutil.copy(files[0], file)
    own, halves, run = (DATA.mean, DATA.std), ((0.5,) * 3, (0.5,) * 3), f"{tmp_path}/run"
    said, timms = "0.500, 0.400, 0.300 and std 0.200", "0.500 and std 0.500, timm's of test_vit"
    cases = [
        (files[0], {}, own, f"{said}, of {run}/config.json"),
        *(
            (file, {}, halves, f"{timms}, without a config.json of it next to {file}")
            for file in files[1:]
        ),
        (
            files[0],
            {"preprocess": ("mean=0.1",)},
            ((0.1,) * 3, DATA.std),
            f"0.100 and std 0.200, by --preprocess mean, the rest of {run}/config.json",
        ),
        (None, {"model": f"local-dir:{run}"}, own, f"{said}, of local-dir:{run}"),
    ]
    for file, more, expected, line in cases:
        config = Config(**TINY | {"model": "test_vit", "initial_checkpoint": file} | more)
        built = planned(config, accelerator)
        assert built.data.normalisation == f"images normalised by mean {line}"
        assert (built.data.mean, built.data.std) == expected
        transform = built.data.transform(16, "crop", 0)
        assert (transform.mean, transform.std) == expected


@pytest.mark.parametrize("name", ["resnet18", "vit_base_patch16_siglip_224"])
def test_a_saved_model_has_the_preprocessing_that_it_was_evaluated_with(tmp_path, name):
    depth = {} if name == "resnet18" else {"depth": 1}
    save_model(build_model(name, 3, (96,), settings=depth), tmp_path, 96, DATA)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["label_names"] == ["cat", "dog", "owl"]
    config = config["pretrained_cfg"]
    for test_size in (False, True):  # timm's own say a crop of 1.0, and squash
        found = timm.data.resolve_data_config(pretrained_cfg=config, use_test_size=test_size)
        assert found | {"input_size": tuple(found["input_size"])} == {
            **{"input_size": (3, 96, 96), "mean": [*DATA.mean], "std": [*DATA.std]},
            **{"interpolation": "bicubic", "crop_pct": 0.9, "crop_mode": "center"},
        }
    loaded = timm.data.resolve_data_config({}, model=load_model(tmp_path))
    assert loaded == timm.data.resolve_data_config(pretrained_cfg=config)
    assert not config.get("license")  # of timm's weights, which these are not
    assert not config.get("paper_ids")


@pytest.mark.parametrize(
    ("name", "pretrained", "message"),
    [
        ("resnet18", True, r"pretrained must go with .* got 'resnet18' \(the hub cannot be reach"),
        ("resnet18.xyz", True, r"pretrained must go with a model of weights .*pretrained tag"),
        ("hf-hub:nobody/nothing", False, r"model must name weights .*the hub cannot be reached"),
        ("local-dir:no/such", False, r"model must name weights .* \(.*No such file"),
        ("ftp:no/such", False, r"model must name weights .*"),
        (
            "resnet1",
            False,
            r"model must be .* knows, such as resnet18, got 'resnet1'",
        ),
    ],
)
def test_models_and_weights_that_are_not_there_are_one_line(name, pretrained, message):
    with pytest.raises(ValueError, match=message) as error:
        build_model(name, 3, (32,), pretrained=pretrained)
    assert "\n" not in str(error.value)


def test_images_that_do_not_fit_into_memory_are_refused_in_one_line():
    def example(size, side):
        if side > 32:
            raise RuntimeError("can't allocate memory:\nyou tried to allocate 120000000000 bytes")
        return torch.zeros(size, 3, side, side), None

    data = SimpleNamespace(example=example, num_classes=2)
    model, passes = build_model("test_resnet", 2, (32,)), []
    model.register_forward_hook(lambda *_: passes.append(1))
    assert check_model(model, data, "test_resnet", (16, 32)) == 2  # of 16 px one pixel is left
    assert len(passes) == 2  # one tells all of a side
    data.num_classes = 3
    line = r"^model must give scores of the data's 3 classes, \[2, 3\] for .*, got \[2, 2\] of"
    with pytest.raises(SettingError, match=line):
        check_model(model, data, "test_resnet", (32,))
    data.num_classes = 2
    line = r"^model must take images of 100000 px, got test_resnet \(can't allocate memory: you"
    with pytest.raises(SettingError, match=line):
        check_model(model, data, "test_resnet", (32, 100_000))


# --- settings of models, and weights of files


def test_settings_of_a_model_are_timms_and_come_back_with_it(tmp_path):
    kwargs = ("drop_path_rate=0.2", "init_values=0.1", "global_pool=avg")
    config = RunConfig(model_kwargs=kwargs)
    count = len(DATA.class_names)
    model = build_model("test_vit", count, (32,), settings=config.model_settings)
    assert [round(float(b.drop_path1.drop_prob), 3) for b in model.blocks[1:]][-1] == 0.2
    assert model.blocks[0].ls1.gamma[0] == 0.1
    save_model(model, tmp_path, 32, DATA)
    again = load_model(tmp_path)
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(again(images), model.eval()(images))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_kwargs": ("num_classes=3",)}, "^model_kwargs must leave num_classes to the data$"),
        ({"model_kwargs": ("pretrained=True",)}, "must leave pretrained to pretrained$"),
        ({"model_kwargs": ("drop_path_rate=1",)}, r"drop_path_rate must be in \[0, 1\), got 1"),
        ({"opt_kwargs": ("layer_decay=a",)}, "have a number as layer_decay, got a"),
        (
            {"initial_checkpoint": "x", "pretrained": True},
            "initial_checkpoint must be unset with p",
        ),
    ],
)
def test_settings_of_models_and_layers_have_bounds(settings, message):
    with pytest.raises(SettingError, match=message):
        _ = (config := RunConfig(**settings)).optimizer_settings, config.model_settings


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
        planned(Config(**{**TINY, **settings}), accelerator)


@pytest.mark.parametrize("classes", [2, 5])
@pytest.mark.parametrize("kind", ["safetensors", "pth"])
@pytest.mark.parametrize("name", ["test_resnet", "test_vit"])
def test_a_model_starts_from_a_file_and_says_what_is_new(tmp_path, caplog, name, kind, classes):
    source = build_model(name, 2, (32,), seed=5)
    file, told = str(tmp_path / f"weights.{kind}"), []
    (save_file if kind == "safetensors" else torch.save)(source.state_dict(), file)
    model = build_model(name, classes, (32,), seed=6)
    load_initial(model, file, told.append)
    differ = differing(model, source)
    assert all(n.startswith(model.pretrained_cfg["classifier"]) for n in differ)
    assert bool(differ) == bool(told) == (classes == 5)
    other = "test_vit" if name == "test_resnet" else "test_resnet"
    model = build_model(other, 2, (32,))
    with pytest.raises(ValueError, match="initial_checkpoint must have the weights of the model"):
        load_initial(model, file, told.append)
    with pytest.raises(ValueError, match="initial_checkpoint must be a file of weights, got none"):
        load_initial(model, "none", told.append)
    assert not caplog.records  # timm would have its own say


@pytest.mark.parametrize("name", ["resnet18", "efficientnet_b0"])
def test_activations_that_are_computed_again_do_not_count_twice_in_statistics(name):
    found = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = timm.create_model(name, num_classes=3, drop_rate=0.0).train()
        if checkpointing:
            model.set_grad_checkpointing()
            count_once(model)
        for _ in range(2):
            model(torch.linspace(0, 1, 2 * 3 * 32 * 32).view(2, 3, 32, 32)).sum().backward()
        found.append(dict(model.named_buffers()))
        assert {norm.momentum for norm in batch_norms(model)} == {0.1}
    for own, value in found[0].items():
        assert torch.equal(value, found[1][own]), own


def test_modules_are_in_their_modes_again_after_an_evaluation():
    model = nn.Sequential(nn.Dropout(), nn.Dropout())
    model[1].eval()
    with kept_modes(model):
        model.eval()
    assert [module.training for module in model.modules()] == [True, True, False]
