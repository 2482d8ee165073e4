"""Packed images: encoded bytes, offsets and labels in files of NumPy, in pieces.

A piece has every k-th row of each split, so that it is a sample of the whole, and all pieces
together are the dataset in its own order.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

SPLITS = ("train", "test")


def pack_rows(
    path: Path, images: Sequence[bytes], labels: np.ndarray, rows: np.ndarray, facts: dict[str, Any]
) -> None:
    """Write encoded images of one split.

    Args:
        path: The file, new.
        images: Encoded images of all rows of the split.
        labels: Their classes, int64 [N, L] of L columns.
        rows: Which of them to write, int64 [n].
        facts: Name of the images' column, classes by column, and the split's rows in all.
    """
    chosen = [images[row] for row in rows]
    with path.open("wb") as file:
        np.savez(
            file,
            content=np.frombuffer(b"".join(chosen), np.uint8),
            offsets=np.cumsum([0, *map(len, chosen)]).astype(np.int64),
            labels=labels[rows],
            rows=rows,
            facts=np.array(json.dumps(facts)),
        )


def packed_files(folder: Path | str, split: str) -> list[Path]:
    """Return the pieces of a split below a folder."""
    return sorted(Path(folder).glob(f"**/{split}-*.npz"))


def images_in(dataset: str) -> dict[str, Any]:
    """Return how many images packed data have, if that is not all of them."""
    found = {}
    for split in SPLITS:
        have, total = 0, 0
        for path in packed_files(dataset, split) if Path(dataset).is_dir() else ():
            with np.load(path) as file:
                have += len(file["rows"])
                total = json.loads(str(file["facts"]))["total"]
        if have < total:
            found[f"{split}_images"] = f"{have} of {total}"
    return found
