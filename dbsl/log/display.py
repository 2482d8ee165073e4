"""Optimizer steps so far, for people: a bar on a terminal, else a line a minute."""

from __future__ import annotations

import math
import sys
import time

from tqdm import tqdm

from dbsl.base.words import short_loss

_BAR = "{percentage:3.0f} %|{bar}| {n_fmt}/{total_fmt} [<{remaining}{postfix}]"  # fits 80 columns
_BAR_EVERY_S, _LINE_EVERY_S = 0.5, 60.0


class Display:
    """Optimizer steps so far: a bar on a terminal; elsewhere a line about once a minute.

    Args:
        total: Steps of the run.
        done: Steps of it that earlier sessions took.
        epochs: Epochs of the run.
        unit: What samples are called.
        loss_name: What the loss is called.
        alone: Whether there is one worker, which then needs no number.
    """

    def __init__(
        self,
        total: int,
        done: int,
        epochs: int,
        unit: str = "images",
        loss_name: str = "loss",
        *,
        alone: bool = False,
    ) -> None:
        self._alone = alone
        self.total, self.done, self._epochs, self._unit = total, done, epochs, unit
        self._loss_name = loss_name
        self._bar = tqdm(
            total=total,
            initial=done,
            bar_format=_BAR,
            dynamic_ncols=True,
            disable=not sys.stderr.isatty(),
        )
        self._every_s = _LINE_EVERY_S if self._bar.disable else _BAR_EVERY_S
        self.loss = math.nan  # the latest that is known
        self.pause()

    def pause(self) -> None:
        """Begin to measure the speed anew: what came before was an evaluation, say."""
        self._samples, self._since = 0, time.perf_counter()

    def step(
        self, samples: int, epoch: int, learning_rate: float, worker: int | None, steps: int = 1
    ) -> None:
        """Note steps with these samples.

        The line names the worker whose learning rate it is, unless all have the same: workers are
        at different places of the schedule, and may have factors of their own.
        """
        self.done += steps
        self._samples += samples
        spent = time.perf_counter() - self._since
        if spent >= self._every_s:
            loss = (
                f"{self._loss_name} {short_loss(self.loss)}, " if math.isfinite(self.loss) else ""
            )
            speed = speed_in_words(self._samples / spent, self._unit)
            text = f"epoch {epoch + 1}/{self._epochs}, "
            if self._bar.disable:
                whose = "" if worker is None or self._alone else f" (worker {worker})"
                text += f"lr {learning_rate:.3g}{whose}, {loss}{speed}"
                self.print(f"  {self.done}/{self.total} steps, {text}")
            else:
                self._bar.set_postfix_str(f"{text}{loss}{speed}", refresh=False)
            self.pause()
        self._bar.update(steps)

    def expect(self, more: int) -> None:
        """Note that the run takes so many more steps than it was to take, or fewer."""
        self.total += more
        self._bar.total = self.total

    def print(self, line: str) -> None:
        """Print a line to stdout; the bar gets out of its way."""
        tqdm.write(line)
        sys.stdout.flush()
        self.pause()

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()


def speed_in_words(speed: float, unit: str) -> str:
    """Return a speed in words."""
    return f"{speed:.0f} {unit}/s" if speed >= 10 else f"{speed:.2g} {unit}/s"
