"""Samples of unlike lengths, dealt so that all processes are done together.

A batch is padded to its longest sample, so its cost is samples times that length. Where parts of a
joint batch have sorted lengths side by side, no part can be made cheaper by an exchange.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def deal(lengths: np.ndarray, speeds: Sequence[float], least: int = 1) -> list[np.ndarray]:
    """Return the places of a joint batch that each process gets, ascending, int64.

    The largest padded cost over speed is the least that parts side by side allow, with the longest
    samples at the fastest process or at the slowest. Each has `least` samples.
    """
    lengths = np.asarray(lengths)
    order = np.argsort(-lengths, kind="stable")
    descending = lengths[order].tolist()
    fastest_first = sorted(range(len(speeds)), key=lambda p: -speeds[p])
    found = []
    for processes in (fastest_first, fastest_first[::-1]):
        of_each = [float(speeds[p]) for p in processes]
        counts = _soonest(descending, of_each, least)
        found.append((_time(descending, of_each, counts), processes, counts))
    _, processes, counts = min(found, key=lambda each: each[0])
    ends = np.cumsum([0, *counts])
    parts: list[np.ndarray] = [order[:0]] * len(speeds)
    for place, process in enumerate(processes):
        parts[process] = np.sort(order[ends[place] : ends[place + 1]])
    return parts


def _soonest(lengths: list[float], speeds: list[float], least: int) -> list[int]:
    """Return how many of the sorted samples each takes, in order, to be done soonest."""
    low, high = 0.0, lengths[0] * len(lengths) / min(speeds)
    for _ in range(48):
        middle = (low + high) / 2
        low, high = (low, middle) if _taken(lengths, speeds, least, middle) else (middle, high)
    return _taken(lengths, speeds, least, high)


def _taken(lengths: list[float], speeds: list[float], least: int, time: float) -> list[int]:
    """Return how many each takes within a time; empty if some are left."""
    counts, first = [], 0
    for number, speed in enumerate(speeds):
        rest = len(lengths) - first - least * (len(speeds) - number - 1)
        count = min(rest, max(least, int(time * speed / lengths[first])))
        counts.append(count)
        first += count
    return counts if first == len(lengths) and _time(lengths, speeds, counts) <= time else []


def _time(lengths: list[float], speeds: list[float], counts: list[int]) -> float:
    starts = np.cumsum([0, *counts]).tolist()
    costs = zip(counts, starts[:-1], speeds, strict=True)
    return max(count * lengths[start] / speed for count, start, speed in costs)
