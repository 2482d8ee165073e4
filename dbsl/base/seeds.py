"""Random streams: one per purpose, each a function of the run's seed and its purpose.

Nothing here depends on the number of workers, their timing or the order of calls, so a sample is
augmented alike whichever worker trains on it.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # SplitMix64: Steele, Lea, Flood, OOPSLA 2014


def stream_seed(seed: int, purpose: str, *keys: int) -> int:
    """Return a 63-bit seed for one purpose, e.g. ``stream_seed(0, "dropout", worker, epoch)``.

    The run's seed and the keys are at least 0; different names give independent streams.
    """
    # SeedSequence pads with zeros: without len(keys), (1,) and (1, 0) would be one stream.
    entropy = [seed, zlib.crc32(purpose.encode()), len(keys), *keys]
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> np.uint64(1))


def generator(seed: int, purpose: str, *keys: int) -> np.random.Generator:
    """Return a NumPy generator on the stream that `stream_seed` names."""
    return np.random.default_rng(stream_seed(seed, purpose, *keys))


def sample_seeds(stream: int, samples: np.ndarray) -> np.ndarray:
    """Return one seed per sample, uint64 [B], from a `stream_seed` and sample numbers [B]."""
    return _mix(np.asarray(samples).astype(np.uint64) * _GOLDEN + np.uint64(stream))


def sample_uniforms(stream: int, samples: np.ndarray, draws: int) -> np.ndarray:
    """Return uniform numbers in [0, 1), float64 [B, draws]: row i depends only on sample i.

    One vectorised call serves a whole batch, so a stream per sample needs no loop.
    """
    seeds = sample_seeds(stream, samples)[:, None]
    counters = np.arange(1, draws + 1, dtype=np.uint64)[None, :] * _GOLDEN
    return (_mix(seeds + counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(state: np.ndarray) -> np.ndarray:
    """Apply the finaliser of SplitMix64 (arithmetic modulo 2**64)."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


@contextmanager
def global_streams(seed: int | None = None) -> Iterator[None]:
    """Seed Python's, NumPy's and torch's global generators inside; restore them afterwards.

    timm and torchvision draw from these. Their draws for a sample then depend only on its seed, not
    on the process or earlier draws. With None, it only restores. Device generators are left out.
    """
    import torch  # plans need none

    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    state = torch.default_generator.get_state()
    try:
        if seed is not None:
            seed_streams(seed)
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        torch.default_generator.set_state(state)


def seed_streams(seed: int) -> None:
    """Seed all three generators from a seed in [0, 2**63)."""
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.default_generator.manual_seed(seed)
