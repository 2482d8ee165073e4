"""timm's training script on a model with this project's stem for small images.

    python -m experiments.benchmarks.speed.timm_script PATH/TO/train.py FLAGS...

The script itself is not changed; it builds `timm.create_model(...)`, which is made to return the
same network that the other arms train.
"""

from __future__ import annotations

import itertools
import runpy
import sys

import datasets
import timm

from dbsl.config.image_settings import ImageConfig
from dbsl.data.dataset import load_data
from dbsl.data.tables import choose_columns
from dbsl.model import build_model


def main() -> None:
    """Run the script."""
    script, *flags = sys.argv[1:]
    value = dict(itertools.pairwise(flags))
    folder, side = value["--data-dir"], int(value["--img-size"])
    data = load_data(ImageConfig(folder))
    load_dataset = datasets.load_dataset

    def create_model(name, **_):
        return build_model(name, data.num_classes, (side,))

    timm.models.create_model = create_model  # dbsl calls timm.create_model
    datasets.load_dataset = lambda path, split, **_: load_dataset(folder, split=split)
    features = load_dataset(folder, split="train").features
    image_column, label_column = choose_columns(ImageConfig(folder), features)
    flags += ["--dataset", "hfds/local", "--input-key", image_column, "--target-key", label_column]
    flags += ["--val-split", data.eval_split, "--num-classes", str(data.num_classes)]
    flags += ["--mean", *map(str, data.mean), "--std", *map(str, data.std)]
    sys.argv = [script, *flags]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
