"""As much of the library `datasets` as dbsl needs to read packed images, and the digits.

It is put on the path where the library is missing, and for packed images, which it cannot read:
the library and pyarrow are larger than CIFAR-100. See gpu/data.py for the files.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from PIL import Image as Pillow
from PIL import ImageOps

_CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "dbsl-packed"
_ORIENTATION = 0x0112  # EXIF's tag

config = SimpleNamespace(
    HF_DATASETS_CACHE=str(_CACHE), HF_CACHE_HOME=str(_CACHE), HF_HUB_OFFLINE=True
)


class Image:
    """Feature of a column of images; values are ``{"bytes": ..., "path": None}``."""

    dtype = "PIL.Image.Image"

    def __init__(self, mode: str | None = None, decode: bool = True) -> None:
        self.mode, self.decode = mode, decode

    def decode_example(self, value: Mapping[str, Any]) -> Pillow.Image:
        """Return the image, turned as EXIF says."""
        image = Pillow.open(io.BytesIO(value["bytes"]))
        image.load()
        if image.getexif().get(_ORIENTATION) is not None:
            image = ImageOps.exif_transpose(image)
        return image.convert(self.mode) if self.mode and self.mode != image.mode else image


class Value:
    """Feature of a column of plain values."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype


class ClassLabel:
    """Feature of a column of class numbers."""

    dtype = "int64"

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self.num_classes = len(self.names)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClassLabel) and other.names == self.names

    __hash__ = None


class Features(dict):
    """Features by column."""


class _Labels:
    """A column as Arrow would give it."""

    null_count = 0

    def __init__(self, values: np.ndarray) -> None:
        self._values = values

    def to_numpy(self) -> np.ndarray:
        return self._values


class Dataset:
    """One split: a column of encoded images and one of labels."""

    def __init__(
        self, columns: Mapping[str, np.ndarray], features: Features, fingerprint: str
    ) -> None:
        self._columns, self.features = dict(columns), features
        self._fingerprint = fingerprint
        self._arrow = False
        self.cache_files: list[dict[str, str]] = []

    @classmethod
    def from_dict(cls, columns: Mapping[str, Any], features: Features) -> Dataset:
        """Return a split of images and labels, encoding the images without loss."""
        found, digest = {}, hashlib.sha256()
        for name, values in columns.items():
            if isinstance(features[name], Image):
                values = _objects(map(_encode, values))
            found[name] = np.asarray(values)
            for value in found[name]:
                digest.update(value if isinstance(value, bytes) else repr(value).encode())
        return cls(found, features, digest.hexdigest())

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __getitem__(self, rows: Any) -> dict[str, Any]:
        return {name: self._values(name, values[rows]) for name, values in self._columns.items()}

    def select_columns(self, names: Sequence[str]) -> Dataset:
        """Return a split of these columns."""
        features = Features({name: self.features[name] for name in names})
        return Dataset({n: self._columns[n] for n in names}, features, self._fingerprint)

    def cast_column(self, name: str, feature: Any) -> Dataset:
        """Return a split that gives a column's values in another way."""
        features = Features({**self.features, name: feature})
        return Dataset(self._columns, features, self._fingerprint)

    def with_format(self, kind: str | None) -> Dataset:
        """Return a split whose columns come as they are (None), or as Arrow's (``arrow``)."""
        found = Dataset(self._columns, self.features, self._fingerprint)
        found._arrow = kind == "arrow"
        return found

    def _values(self, name: str, values: Any) -> Any:
        feature = self.features[name]
        if not isinstance(feature, Image):
            return _Labels(values) if self._arrow else values.tolist()

        def give(content: bytes) -> Any:
            value = {"bytes": content, "path": None}
            return feature.decode_example(value) if feature.decode else value

        return give(values) if isinstance(values, bytes) else [give(content) for content in values]


def load_dataset_builder(path: str, **_: Any) -> SimpleNamespace:
    """Return what has the splits of a folder of packed images, in the order of their rows."""
    found = {}
    for split in ("train", "test"):
        files = sorted(Path(path).glob(f"**/{split}-*.npz"))
        if files:
            found[split] = _read(files)
    if not found:
        raise FileNotFoundError(f"{path} has no packed images, and `datasets` is not installed")
    splits = {name: SimpleNamespace(num_examples=len(table)) for name, table in found.items()}
    return SimpleNamespace(
        name="packed",
        config=SimpleNamespace(data_files=dict.fromkeys(found, ())),
        info=SimpleNamespace(splits=splits),
        download_and_prepare=lambda: None,
        as_dataset=found.get,
    )


def load_from_disk(path: str) -> Dataset:
    """Refuse: only the library itself reads that."""
    raise ModuleNotFoundError(f"{path} was written by `datasets`, which is not installed")


def disable_progress_bars() -> None:
    """Do nothing: there are none."""


def _read(files: Sequence[Path]) -> Dataset:
    images, labels, rows, digest = [], [], [], hashlib.sha256()
    for path in files:
        with np.load(path, allow_pickle=False) as file:
            content, offsets = file["content"].tobytes(), file["offsets"]
            images += [content[a:b] for a, b in itertools.pairwise(offsets)]
            labels.append(file["labels"])
            rows.append(file["rows"])
            facts = json.loads(str(file["facts"]))
        digest.update(content)
    order = np.argsort(np.concatenate(rows), kind="stable")
    columns = {facts["image_column"]: _objects(images)[order]}
    features = Features({facts["image_column"]: Image()})
    for own, (name, classes) in zip(
        np.concatenate(labels).T, facts["classes"].items(), strict=True
    ):
        columns[name], features[name] = own[order], ClassLabel(classes)
    return Dataset(columns, features, digest.hexdigest())


def _encode(image: Pillow.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def _objects(images: Iterable[bytes]) -> np.ndarray:
    """Return bytes as an array of objects: NumPy's own type would cut trailing zeros."""
    images = list(images)
    found = np.empty(len(images), dtype=object)
    found[:] = images
    return found
