"""A shaped link between two network namespaces. Needs root, ip and tc."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

ADDRESSES = ("10.87.0.1", "10.87.0.2")


@contextmanager
def link(megabits: float | None) -> Iterator[list[list[str]]]:
    """Make two namespaces and a link between them; gives what commands inside begin with.

    The link is a veth pair shaped on both ends (``tbf``), so that every byte between the processes
    really waits for it.

    Args:
        megabits: Rate of each direction, per second; None: as fast as the machine is.

    Raises:
        RuntimeError: If namespaces cannot be made, as without root.
    """
    names = [f"dbsl{side}-{os.getpid()}" for side in range(2)]
    ends = [f"dbv{side}-{os.getpid()}"[:15] for side in range(2)]
    try:
        for name in names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for name, end, address in zip(names, ends, ADDRESSES, strict=True):
            _ip("link", "set", end, "netns", name)
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            _ip("-n", name, "link", "set", end, "up")
            if megabits is not None:
                shape = ("rate", f"{megabits}mbit", "burst", "64kb", "latency", "200ms")
                _command("tc", "-n", name, "qdisc", "add", "dev", end, "root", "tbf", *shape)
        cores = sorted(os.sched_getaffinity(0))
        yield [
            [
                *("ip", "netns", "exec", name, "taskset", "-c", str(cores[side % len(cores)])),
                *("env", f"GLOO_SOCKET_IFNAME={ends[side]}"),
            ]
            for side, name in enumerate(names)
        ]
    finally:
        for name in names:  # the pair goes with them
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _ip(*arguments: str) -> None:
    _command("ip", *arguments)


def _command(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed (it needs root): {done.stderr.strip()}")
