"""Ranks of train.py on this machine, in forks of a process that has everything imported."""

from __future__ import annotations

import os
import signal
import socket
import traceback


def preload() -> None:
    """Import what runs import when they need it, and draw nothing: runs are forks of this."""
    import datasets  # noqa: F401
    import sklearn.datasets  # noqa: F401
    import timm.optim  # noqa: F401
    import torchvision.transforms.v2  # noqa: F401

    import train  # noqa: F401
    from dbsl.extras.charts import Charts

    Charts._draw = lambda *arguments: None


def fork_rank(flags: list[str], rank: int, processes: int, port: int) -> int:
    """Run train.py as a rank in a fork of this process; return its process id.

    What it prints is added to the file that KILLS_OUTPUT names, if it is set.

    Args:
        flags: Of train.py.
        rank: The fork's.
        processes: Of the run; 1: a simulated cluster.
        port: Where they meet on this machine.
    """
    child = os.fork()
    if child:
        return child
    import train
    from dbsl.config.parse import parse_config

    status = 1
    try:
        sink = os.open(os.environ.get("KILLS_OUTPUT", os.devnull), os.O_WRONLY | os.O_APPEND)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        if processes > 1:
            numbers = {"RANK": rank, "WORLD_SIZE": processes, "MASTER_PORT": port}
            numbers |= {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": processes}
            os.environ |= {name: str(number) for name, number in numbers.items()}
            os.environ["MASTER_ADDR"] = "127.0.0.1"
        train.main(parse_config(train.Config, flags))
        status = 0
    except SystemExit as error:
        status = error.code
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(status)


def end_in_order() -> None:
    """Have SIGTERM and SIGHUP end this process as Ctrl-C does: what it has made goes with it."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # nohup stays
            signal.signal(number, signal.default_int_handler)


def free_port() -> int:
    """Return a port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
