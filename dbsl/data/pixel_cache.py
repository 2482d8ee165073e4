"""Decoded pixels on disk: images of a dataset are decoded once."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import uuid
from pathlib import Path

import numpy as np

from dbsl.base.lazy import lazy_import
from dbsl.data.images import ImageSplit, check_bad

datasets = lazy_import("datasets")
logger = logging.getLogger(__name__)

_CHUNK = 1024  # images decoded at a time
_CACHE_FORMAT = 1

Decoded = tuple[np.ndarray, np.ndarray, dict[int, str]]  # pixels, their samples, bad rows


def decode_cached(split: ImageSplit, side: int, max_bad: int) -> Decoded | None:
    """Return a split's pixels, read from the cache if possible; None if an image has another size.

    On the CPU, processes that read the cache share its memory.
    """
    cache, shape = _cache_file(split), (len(split), side, side, 3)
    everything = np.arange(len(split))
    with contextlib.suppress(Exception):  # no file, or one whose header is damaged in some way
        pixels = np.load(cache, mmap_mode="c", allow_pickle=False)
        if pixels.shape == shape and pixels.dtype == np.uint8:
            return pixels, everything, {}
    pixels, bad = np.empty(shape, np.uint8), {}
    for start in range(0, len(split), _CHUNK):
        samples = np.arange(start, min(start + _CHUNK, len(split)))
        for sample, image in zip(samples, split.decode(samples), strict=True):
            if isinstance(image, str):
                bad[int(sample)] = image
            elif image.size != (side, side):
                return None
            else:
                pixels[sample] = image
    if not bad:
        _write_cache(cache, pixels)
        return pixels, everything, {}
    rows = {int(split.rows[sample]): reason for sample, reason in bad.items()}
    check_bad(rows, max_bad, split)
    for row, reason in rows.items():
        logger.warning("left out: %s", split.describe_bad(row, reason))
    good = np.delete(everything, list(bad))
    return pixels[good], good, rows


def _cache_file(split: ImageSplit) -> Path:
    """Return where a split's pixels belong: the name is a hash of all that they depend on."""
    files = [Path(file["filename"]).stat() for file in split.table.cache_files]
    content = (
        _CACHE_FORMAT,
        split.table._fingerprint,  # it says how the rows were made
        [(file.st_size, file.st_mtime_ns) for file in files],  # a folder may be saved anew
        split.image_column,
    )
    digest = hashlib.sha256(repr(content).encode() + split.rows.tobytes()).hexdigest()
    return Path(datasets.config.HF_DATASETS_CACHE) / "dbsl" / f"pixels-{digest[:32]}.npy"


def _write_cache(path: Path, pixels: np.ndarray) -> None:
    """Write the pixels, if they can be written; another process may be doing the same."""
    temporary = path.with_suffix(f".{uuid.uuid4().hex}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("xb") as file:
            np.save(file, pixels, allow_pickle=False)
        temporary.replace(path)
    except OSError as error:
        logger.warning("decoded images are not cached (%s)", error)
        with contextlib.suppress(OSError):
            temporary.unlink()
