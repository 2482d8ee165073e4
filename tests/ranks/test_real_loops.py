"""Loops as other libraries' scripts have them: as one process on the joint batch.

`experiments/results/own_loop/loops.csv` has what the scripts themselves gave.
"""

import importlib.util
import os
import warnings

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import dbsl
from dbsl.library.loader import UnevenLoader
from tests.helpers import place_of, short

LAST = 12


class Enough(Exception):
    """Ends a loop after its last step."""


def timm(sizes, seen, folder, scaled):
    torch.set_default_dtype(torch.float64)
    from timm import create_model
    from timm.data import create_dataset, create_loader
    from timm.task import ClassificationTask

    options = {"is_training": True, "no_aug": True, "num_workers": 0, "img_dtype": torch.float64}
    data = create_dataset("", root=f"{folder}/images", split="train")
    loader = create_loader(data, (3, 32, 32), 4, device=torch.device("cpu"), **options)
    uneven = loader.loader = dbsl.uneven(loader.loader, sizes)  # in timm's prefetcher
    task = ClassificationTask(create_model("test_vit", num_classes=2), nn.CrossEntropyLoss())
    task.prepare_distributed(device_ids=None)
    optimizer = torch.optim.SGD(task.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(LAST):
        loader.batch_sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = task(images, labels)["loss"] * uneven.scale(len(labels))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen(task.get_trainable_module())


def ultralytics(sizes, seen, folder, scaled):
    os.environ.update(YOLO_OFFLINE="1", YOLO_CONFIG_DIR=folder)
    from examples.own_loop import ultralytics_yolo as recipe

    class Steps(recipe.UnevenTrainer):
        def _model_train(self):  # batch norm has each process's own statistics: here none
            for module in self.model.modules():
                module.training = not isinstance(module, nn.BatchNorm2d)

        def optimizer_step(self):
            super().optimizer_step()
            seen(self.model)

    recipe.UnevenTrainer = Steps
    if not scaled:
        recipe.JointLoss = lambda criterion: None
    off = ("mosaic", "hsv_h", "hsv_s", "hsv_v", "translate", "scale", "fliplr", "erasing")
    off += ("close_mosaic", "warmup_epochs", "weight_decay")
    settings = dict.fromkeys(off, 0) | dict.fromkeys(("plots", "amp", "val"), False)
    settings |= {"optimizer": "SGD", "nbs": sum(sizes)}
    seed = int(len(sizes) == 1)  # a process adds its rank, or -1
    place = {"project": f"{folder}/{os.getpid()}", "imgsz": 64, "epochs": LAST, "seed": seed}
    recipe.train("yolo11n.yaml", f"{folder}/data.yaml", sizes, **settings, **place)


def weights_after(rank, loop, sizes, folder, scaled):
    """Return the weights after 3 and after 12 steps of a loop."""
    warnings.simplefilter("ignore")
    os.environ.update(place_of(rank, len(sizes)))
    torch.manual_seed(0)
    if not scaled:
        UnevenLoader.scale = lambda loader, count: 1.0
    found, steps = [], iter(range(1, LAST + 1))

    def seen(model):
        step = next(steps)
        weights = [p.detach().flatten() for p in model.parameters()]
        if step in (3, LAST):
            found.append(torch.cat(weights).numpy())
        if step == LAST:
            raise Enough

    with pytest.raises(Enough):
        loop(sizes, seen, folder, scaled)
    return found


@pytest.mark.parametrize("sizes", short([[2, 6], [1, 7]], [2, 6]))
@pytest.mark.parametrize("loop", short([timm, ultralytics], timm))
def test_a_real_loop_trains_as_one_process_on_the_joint_batch(run_ranks, tmp_path, loop, sizes):
    if importlib.util.find_spec(loop.__name__) is None:
        pytest.skip(f"{loop.__name__} is not installed")
    noise = np.random.default_rng(0).integers(0, 255, (40, 64, 64, 3), dtype=np.uint8)
    for number, pixels in enumerate(noise):
        for name in (f"images/train/{number % 2}/{number}", f"yolo/images/{number}"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(tmp_path / f"{name}.png")
        label = tmp_path / f"yolo/labels/{number}.txt"
        label.parent.mkdir(exist_ok=True)
        label.write_text(f"{number % 2} 0.5 0.4 0.3 0.{number % 4 + 2}\n" * (number % 3))
    yaml = "train: images\nval: images\nnames: {0: a, 1: b}\n"
    (tmp_path / "data.yaml").write_text(f"path: {tmp_path}/yolo\n{yaml}")
    cases = (([8], True), (sizes, True), (sizes, False))
    joined, found, control = (
        run_ranks(weights_after, loop, of, str(tmp_path), scaled, world_size=len(of))[0]
        for of, scaled in cases
    )
    bound = 1e-9 if loop is timm else 1e-6  # YOLO computes in float32
    for weights, own, other in zip(joined, found, control, strict=True):
        assert abs(own - weights).max() < bound
        assert abs(other - weights).max() > 1e-3
