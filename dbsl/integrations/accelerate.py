"""A batch size for each process in Accelerate's scripts: `prepare` takes the sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import nn
from torch.utils.data import DataLoader

from dbsl.base.errors import require
from dbsl.library.loader import UnevenLoader, uneven


class PreparedLoader(UnevenLoader):
    """An uneven loader with its batches on the accelerator's device.

    `scale` also makes up for `backward`, which divides by the accumulation steps.
    """

    end_of_dataloader, remainder = False, -1  # Accelerate reads them

    def __init__(self, accelerator: Accelerator, loader: UnevenLoader) -> None:
        super().__init__(loader.fetcher, loader.sampler)
        self.accelerator = accelerator

    def scale(self, count: int) -> float:  # noqa: D102 (the sampler's)
        return self.sampler.scale(count) * self.accelerator.gradient_accumulation_steps

    def _pass(self, first: int) -> Any:
        state = self.accelerator.gradient_state
        state._add_dataloader(self)  # so a window of batches ends with the epoch
        try:
            for number, batch in enumerate(super()._pass(first), first + 1):
                self.end_of_dataloader = number == len(self)
                yield send_to_device(batch, self.accelerator.device)
        finally:
            state._remove_dataloader(self)


def prepare(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Any,
    loader: DataLoader,
    *others: Any,
    local_batch_sizes: Sequence[int] | None = None,
    resume: str = "skip",
    **options: Any,
) -> tuple[Any, ...]:
    """Return what ``accelerator.prepare`` does, with a loader from `dbsl.uneven`.

    ::

        model, optimizer, loader, scheduler = prepare(
            accelerator, model, optimizer, loader, scheduler, local_batch_sizes=[216, 40]
        )
        ...
        accelerator.backward(loss * loader.scale(len(labels)))

    With `resume` "skip", the script skips finished batches by Accelerate's `skip_first_batches`,
    and the loader counts them. With "state", the loader is registered, continues by itself after
    `load_state`, and raises an error if the script skips too. `options` are those of
    `dbsl.uneven`; `accumulate` is the accelerator's.
    """
    require(resume in ("skip", "state"), "resume must be skip or state", resume)
    options.setdefault("accumulate", accelerator.gradient_accumulation_steps)
    prepared = PreparedLoader(accelerator, uneven(loader, local_batch_sizes, **options))
    if resume == "state":
        accelerator.register_for_checkpointing(prepared)
    model, optimizer, *others = accelerator.prepare(model, optimizer, *others)
    return model, optimizer, prepared, *others
