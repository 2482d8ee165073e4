"""Loader processes: how they begin, and that they end with the process that they serve.

Whoever asks a run to stop may ask all of its processes at once: a terminal by Ctrl-C, `timeout` and
launchers by SIGTERM. The run then finishes its step, for which it needs its loader processes. So
they, and the fork server that makes them, do not heed these signals unless the run sends them.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker

_HAS_FORK_SERVER = "forkserver" in multiprocessing.get_all_start_methods()  # not on Windows
_TELLS_SENDER = hasattr(signal, "sigwaitinfo")  # not on macOS: there signals end loader processes
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # ask a run to stop


def process_context(imports: Sequence[str]) -> multiprocessing.context.BaseContext:
    """Return a way to start processes that does not copy this one's threads and locks.

    Args:
        imports: Modules to be imported once, for all loader processes.
    """
    if not _HAS_FORK_SERVER:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(imports))
    return context


def start_server() -> None:
    """Start the process that makes loader processes, unless it runs.

    It inherits that the signals are blocked, and so do the processes that it makes.
    """
    if not (_HAS_FORK_SERVER and _TELLS_SENDER):
        return
    resource_tracker.ensure_running()  # else the server starts it, which unblocks the signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent(_: int) -> None:
    """End this loader process when the one that it serves is gone, or ends it.

    DataLoader's own watch is on the fork server, which in turn lives as long as its processes.
    """
    parent = multiprocessing.parent_process()

    def wait() -> None:
        parent.join()
        os._exit(1)  # sys.exit would end the thread alone

    def obey() -> None:
        while True:
            if signal.sigwaitinfo(_SIGNALS).si_pid == parent.pid:
                os._exit(1)

    for watch in (wait, obey) if _TELLS_SENDER else (wait,):
        threading.Thread(target=watch, daemon=True).start()
