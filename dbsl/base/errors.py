"""This project's errors, how a process ends on them, and the words of messages."""

from __future__ import annotations

import difflib
import errno
import importlib
import json
import math
import os
import re
import select
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from numbers import Integral
from pathlib import Path
from typing import Any, NoReturn

_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO}  # not the code's fault

_GLOO = re.compile(r"^\[\S+\.(?:cc|cpp|h|hpp):\d+\] ")  # how gloo's and c10d's errors begin
# Words in torch's errors about failed exchanges.
_EXCHANGE = ("peer", "timed out", "timeout", "gloo", "nccl", "connection", "socket", "broken pipe")


EXIT_REFUSED = 2
EXIT_DIVERGED = 3
EXIT_STOPPED = 75  # EX_TEMPFAIL of sysexits.h: unfinished, to be run again
EXIT_INTERRUPTED = 130  # shells use 128 plus the number of SIGINT
EXIT_UNREAD = 141  # the same with SIGPIPE: the output went to `head`, say


class SettingError(ValueError):
    """A given value cannot be used; the message names the setting, its bound and its value.

    It ends a process with that one line. Any other `ValueError` is a fault and shows its traceback.
    """


class BadRoundsError(SettingError):
    """More rounds were refused than allowed: the run diverges."""


class SyncError(RuntimeError):
    """A worker or the server was lost, or stayed silent for longer than the timeout."""


class NothingLeft(Exception):
    """The run has no round left for this process's worker, which leaves it or never joined it."""


class SaveError(RuntimeError):
    """A checkpoint could not be written."""


class ReadError(RuntimeError):
    """Data could not be read."""


class DivergedError(RuntimeError):
    """The run finished, but its weights are useless."""


_OWN = (SettingError, SyncError, SaveError, ReadError, DivergedError)


class RunStopped(Exception):
    """The run must stop: it saves a checkpoint, and then the message says how to continue."""


def quiet_interrupts() -> None:
    """Have Ctrl-C end the process without a traceback until `one_line_errors` is entered."""
    _open_outputs()  # before other files take their numbers
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a background job ignores it
        signal.signal(signal.SIGINT, _end_at_once)


def _open_outputs() -> None:
    """Give a process without outputs (`>&-`) ones that discard what is written."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115


def _end_at_once(*_: object) -> None:
    os._exit(EXIT_INTERRUPTED)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """End the process with one line and a status for the errors that this module defines.

    Status 2: a setting was refused (`SettingError`), a process was lost, data could not be read, or
    a checkpoint could not be written. Status 3: the run diverged (also `BadRoundsError`). Status
    75: the run was asked to stop, and can be resumed. Status 130: Ctrl-C outside training, or twice
    during it. Status 141: nobody reads the output any longer. Any other error is a fault: it keeps
    its traceback, and the status is 1. One of several processes ends at once either way. Otherwise
    it would wait for the others at exit, and they for it.
    """
    _open_outputs()
    if signal.getsignal(signal.SIGINT) is _end_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        _end("interrupted", EXIT_INTERRUPTED, printed=_first_on_machine())
    except RunStopped as stopped:
        _end(str(stopped), EXIT_STOPPED, printed=os.environ.get("RANK", "0") == "0")
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _is_unread():
            os._exit(EXIT_UNREAD)
        if isinstance(error, OSError) and error.errno in _DISK:
            error = SaveError(f"{error.strerror}: {error.filename or 'the run folder'}")
        elif one_of_several() and is_lost_peer(error) and _raised_in(error, "torch.distributed"):
            # While a run starts, nothing watches the others; afterwards the cluster names the rank.
            error = SyncError(f"another process died or fell silent: {reason_of(error)}")
        elif not isinstance(error, _OWN):
            if one_of_several():
                _tell_launcher(traceback.format_exc())
                os.write(2, f"rank {os.environ.get('RANK')}:\n{traceback.format_exc()}".encode())
                os._exit(1)
            raise
        # Every rank meets the same bad input, so one per machine reports it. Each rank reports a
        # lost peer or a full disk.
        printed = not isinstance(error, SettingError) or _first_on_machine()
        diverged = isinstance(error, (DivergedError, BadRoundsError))
        status = EXIT_DIVERGED if diverged else EXIT_REFUSED
        _end(f"error: {error}", status, printed=printed)


def _is_unread() -> bool:
    """Return whether standard output is a pipe that nobody reads any longer."""
    if not hasattr(select, "poll"):  # Windows
        return False
    poll = select.poll()
    poll.register(1, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def run_tool(name: str) -> None:
    """Run a command of dbsl/tools, which no module imports."""
    with one_line_errors():
        if status := importlib.import_module(f"dbsl.tools.{name}").main():
            raise SystemExit(status)


def _end(text: str, status: int, *, printed: bool) -> NoReturn:
    """Say why the process ends, also to torchrun, and end it."""
    told = _tell_launcher(text)
    if printed:
        print(text, file=sys.stderr, flush=True)
        if told or "ACCELERATE_MIXED_PRECISION" in os.environ:  # set by accelerate launch
            what = "(the line above is the reason; the launcher adds a traceback)"
            print(what, file=sys.stderr, flush=True)
    if one_of_several():
        sys.stdout.flush()
        os._exit(status)
    raise SystemExit(status) from None


def _tell_launcher(text: str) -> bool:
    """Have torchrun, if present, repeat this in its report; the first failure is the root cause."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        said = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": int(time.time())}}
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": said}), encoding="utf-8")
    return bool(file)


def _first_on_machine() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


def reason_of(error: BaseException) -> str:
    """Return torch's message on a failed exchange, shortened.

    It omits the place in torch's sources, and the advice after the first sentence.
    """
    return _GLOO.sub("", words_of(error, None)).split(". ")[0]


def is_lost_peer(error: BaseException) -> bool:
    """Whether torch says that an exchange between processes failed.

    Errors in a loop's own code and in data loaders may have the same words.
    """
    if not isinstance(error, RuntimeError):
        return False
    if type(error).__module__.startswith("torch.distributed") or _GLOO.match(str(error)):
        return True
    said = reason_of(error).lower()
    named = any(word in said for word in _EXCHANGE)
    return (
        named and _raised_in(error, "torch", "dbsl") and not _raised_in(error, "torch.utils.data")
    )


def _raised_in(error: BaseException, *packages: str) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    place = Path(frames[-1].filename).resolve() if frames else Path()
    roots = (Path(sys.modules[name].__path__[0]) for name in packages if name in sys.modules)
    return any(root.resolve() in place.parents for root in roots)


def one_of_several() -> bool:
    """Whether other processes train with this one; a launcher may also start only one."""
    dist = sys.modules.get("torch.distributed")  # plans and their command load no torch
    return dist is not None and dist.is_initialized() and dist.get_world_size() > 1


# --- values and errors in messages and lines


def words_of(error: BaseException, most: int | None = 200) -> str:
    """Return an error's message in one line of at most `most` characters, else its type."""
    return " ".join(str(error).split())[:most] or type(error).__name__


def such_as(name: str, known: Iterable[str]) -> str:
    """Return ", such as" and the known name nearest to a name, if any is near."""
    near = difflib.get_close_matches(name, list(known), 1)
    return f", such as {near[0]}" if near else ""


def in_line(error: BaseException) -> str:
    """Return an error and its cause in one line; for a missing library, how to install it."""
    said = [error, error.__cause__] if error.__cause__ else [error]
    text = "; ".join(words_of(one, None) for one in said)
    missing = next((one.name for one in said if isinstance(one, ModuleNotFoundError)), None)
    return f"{text}: pip install {missing.partition('.')[0]}" if missing else text


def duration(seconds: float) -> str:
    """Return a time in an easily read unit."""
    if seconds < 100:
        return f"{seconds:.3g} s"
    if seconds < 1000:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def short_loss(loss: float) -> str:
    """Return a loss in about six characters, whatever its size."""
    if loss < 100 or not math.isfinite(loss):
        return f"{loss:.3f}"
    return f"{loss:.5g}" if loss < 1e5 else f"{loss:.1e}".replace("e+", "e")


def px(resolution: int, before: str = "", after: str = "") -> str:
    """Return an image side in pixels with the text around it; empty if there is none, 0."""
    return f"{before}{resolution} px{after}" if resolution else ""


def as_given(value: Any) -> str:
    """Return a setting's value as a flag takes it."""
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return ",".join(map(as_given, value)) or "empty"
    text = str(value)
    seen = text and text.strip() == text and text.isprintable()
    return text if seen else repr(text)


def steadier(lr: float, optimizer: str, precision: str, *, finite_loss: bool) -> str:
    """Return what to try if loss or weights were not finite."""
    text = f"lower lr ({lr:g} with {optimizer})"
    if precision != "no":
        return f"{text} or try --mixed-precision no instead of {precision}"
    return f"{text}, or see whether all gradients of the loss are finite" if finite_loss else text


def require(ok: Any, must: str, got: Any) -> None:
    """Raise ``SettingError`` unless `ok`: "`must`, got `got`"."""
    if not ok:
        shown = f"{got:g}" if isinstance(got, float) else as_given(got)
        raise SettingError(f"{must}, got {shown}")


# No setting may exceed it, unless its bound says so: a larger number is a mistake, and would
# overflow the arithmetic behind the settings. Floats hold whole numbers up to it exactly.
LARGEST = 1e15


def require_whole(name: str, given: Any, least: int, why: str = "") -> None:
    """Raise ``SettingError`` unless this is an integer of at least `least`, or a list of them."""
    numbers = given if isinstance(given, list | tuple) else [given]
    fits = numbers and all(isinstance(n, Integral) and least <= n <= LARGEST for n in numbers)
    what = "integers" if numbers is given else "an integer"
    require(fits, f"{name} must be {what} of at least {least}{why}", repr(given))


def plural(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless the number is one."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
