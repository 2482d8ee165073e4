"""The Hugging Face hub, asked once whether it answers: its libraries would retry for a minute."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from dbsl.base.lazy import lazy_import

datasets, huggingface_hub = lazy_import("datasets"), lazy_import("huggingface_hub")

_PATIENCE_S = 3.0  # for an answer of any kind


@contextlib.contextmanager
def hub_or_cache() -> Iterator[bool]:
    """Inside, Hugging Face libraries read their caches alone unless the hub answers.

    Yields whether it does. With ``HF_HUB_OFFLINE`` set it is not asked.
    """
    answers = not huggingface_hub.constants.HF_HUB_OFFLINE and _hub_answers()
    settings = (huggingface_hub.constants, datasets.config)
    before = [module.HF_HUB_OFFLINE for module in settings]
    try:
        for module in settings:
            module.HF_HUB_OFFLINE = not answers
        yield answers
    finally:
        for module, value in zip(settings, before, strict=True):
            module.HF_HUB_OFFLINE = value


def _hub_answers() -> bool:
    try:
        session = huggingface_hub.utils.get_session()  # has the user's proxies and certificates
        session.head(huggingface_hub.constants.ENDPOINT, timeout=_PATIENCE_S)
    except Exception:  # no name, no route, no answer: each client library has types of its own
        return False
    return True
