"""Images by sample number: small ones decoded once, others by loader processes when needed.

The caller chooses the samples of each batch, so every worker may have its own batch size. No source
here may pass through `accelerator.prepare`, which would shard its batches again.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import multiprocessing
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch.utils.data import DataLoader, get_worker_info

from dbsl.base.errors import ReadError, SettingError, words_of
from dbsl.base.files import write_with
from dbsl.base.machine import STOP_SIGNALS, lazy_import
from dbsl.data.sources import Batch, Source
from dbsl.data.transforms import Transform, as_rgb, to_device

with contextlib.suppress(ImportError):
    import pillow_heif  # reads phones' images, if it is installed

    pillow_heif.register_heif_opener()

datasets, hub = lazy_import("datasets"), lazy_import("huggingface_hub.constants")
logger = logging.getLogger(__name__)

_CHUNK = 1024  # images read from a table at a time
_CACHE_FORMAT = 2
_IMPORTS = [__name__, "datasets", "torchvision.transforms.v2"]  # what loader processes import
_TELLS_SENDER = hasattr(signal, "sigwaitinfo")  # not on macOS: there signals end loader processes
_FORKS = "forkserver" in multiprocessing.get_all_start_methods()  # not on Windows
_CONTEXT = "forkserver" if _FORKS else "spawn"
_LOOK_S = 2  # seconds between checks of a wait for a batch
_ORIENTATION = 0x0112  # the EXIF tag
_SHARED = Path("/dev/shm")  # batches pass through it
_AHEAD = 2  # batches that each loader process makes before they are requested

_BUFFER = re.compile(r" (file )?<_io.BytesIO .*?>")  # in Pillow's messages

BadRows = Mapping[int, str]  # rows of images that could not be decoded, and why
Request = tuple[np.ndarray, Transform, int]  # samples, transform, epoch: one batch
Loaded = tuple[torch.Tensor, torch.Tensor, BadRows]  # images, their places
Stored = Mapping[str, Any] | None  # an image as a table has it: bytes and path, either may be None


class ImageLoader(Source):
    """Large or uneven images, decoded and cut to size in loader processes as needed.

    Images that cannot be decoded are missing from their batches, float32 [B, 3, R, R]. The
    processes start with `start`, or else with the first batch, and live as long as this object. A
    fork server makes them, because forking a process that has CUDA or gloo threads may hang. Each
    therefore imports the main script, which needs its ``if __name__ == "__main__":``.
    """

    _Requests: type[list[Request]] = list  # loader processes receive its items
    _shared = 0  # bytes of shared memory that current batches take
    _told = False  # whether a shortage was reported

    def __init__(
        self,
        split: ImageSplit,
        device: torch.device,
        loader_workers: int,  # processes; 0: this one
        max_bad: int = 0,  # images that may fail to decode; more are an error
    ) -> None:
        self.labels, self.device, self.bad = split.labels, device, dict(split.bad)
        self._split = split
        self._max_bad = max_bad
        self._calls = 0  # calls of `batches`
        self._while_waiting: Callable[[], object] = lambda: None
        self._requests = self._Requests()  # of the latest call
        self._loader = DataLoader(
            split,
            batch_size=None,  # a request is a whole batch, of any size
            sampler=self._requests,
            num_workers=loader_workers,
            multiprocessing_context=_CONTEXT if loader_workers else None,
            worker_init_fn=_end_with_parent,
            persistent_workers=loader_workers > 0,
            prefetch_factor=_AHEAD if loader_workers else None,
            pin_memory=device.type == "cuda",
            generator=torch.Generator(),  # else each call would advance torch's own
        )

    def __len__(self) -> int:
        return len(self.labels)

    def start(self, while_waiting: Callable[[], object] = lambda: None) -> None:
        """Start the loader processes, and wait until each is running.

        A wait for a batch calls `while_waiting` every few seconds, and ends if that raises.
        """
        self._while_waiting = while_waiting
        if self._loader.num_workers and not self._calls:
            _start_server()
            iter(self._loader)  # over no requests: they only start
            iter(self._loader)  # begins again, which each of them confirms

    def batches(
        self, index_batches: Iterable[np.ndarray], transform: Transform, epoch: int = 0
    ) -> Iterator[Batch]:
        """See `Source.batches`; a new call ends an earlier one still in progress.

        Loader processes begin before the first batch is requested.
        """
        self._calls += 1
        requests = [(samples, transform, epoch) for samples in index_batches]
        self._requests[:] = requests
        if workers := self._loader.num_workers:
            _start_server()
            largest = max((len(samples) for samples, _, _ in requests), default=0)
            at_once = min(len(requests), _AHEAD * workers)
            self._shared = at_once * largest * 3 * transform.resolution**2
            if _SHARED.is_dir() and self._shared > _free() and not self._told:
                self._told = True
                logger.warning("%s", self._too_small())
        # With loader processes, this is the same iterator in a new epoch.
        return self._read(self._calls, requests, iter(self._loader))

    def _read(
        self, call: int, requests: Sequence[Request], loaded: Iterator[Loaded]
    ) -> Iterator[Batch]:
        for number, (wanted, transform, epoch) in enumerate(requests):
            images, decoded, bad = self._next(loaded)
            self._received(number)
            samples = wanted[decoded.numpy()]
            if bad:
                note_bad(self.bad, bad, self._max_bad, self._split)
                text = f"none of the {len(wanted)} images of a batch can be decoded"
                if not len(samples):
                    raise SettingError(f"{text}: repair or remove them")
            if len(samples) == 1 < len(wanted):  # batch norm needs two
                samples, images = samples.repeat(2), images.repeat(2, 1, 1, 1)
            images = images.to(self.device, non_blocking=True)
            images = transform(images, samples, epoch, prepared=True)
            yield images, to_device(self.labels[samples], self.device)
            if call != self._calls:
                raise RuntimeError("a later call of batches() took over the loader processes")

    def _next(self, loaded: Iterator[Loaded]) -> Loaded:
        """Return the loader processes' next batch; the wait ends if they cannot go on."""
        while True:
            loaded._timeout = _LOOK_S  # not DataLoader's own, which also limits their start
            try:
                return next(loaded)
            except RuntimeError as error:
                said = str(error)
                if "exited unexpectedly" in said:
                    why = "a loader process died: memory may be short; lower --loader-workers"
                    raise ReadError(f"{why} ({words_of(error)})") from None
                if "shared memory" in said:
                    raise ReadError(self._too_small()) from None
                if "timed out" not in said:
                    raise
                self._while_waiting()
            finally:
                loaded._timeout = 0

    def _too_small(self) -> str:
        """Return what to do if shared memory cannot hold the current batches."""
        mib = -(-self._shared // 2**20)
        must = f"{_SHARED} must have {mib} MiB for the batches of loader processes"
        remedy = f"docker run --shm-size {mib + 64}m, or lower --loader-workers (0: none)"
        return f"{must}, got {_free() / 2**20:.0f} MiB free: {remedy}"

    def _received(self, number: int) -> None:
        """Note that a batch of the latest call has been decoded."""


def _free() -> int:
    return shutil.disk_usage(_SHARED).free


def note_bad(known: dict[int, str], found: BadRows, most: int, split: ImageSplit) -> None:
    """Add a split's images that cannot be decoded to those known; refuse more than `most`."""
    new = {row: reason for row, reason in found.items() if row not in known}
    known |= new
    if len(known) > most:
        row, reason = next(reversed(known.items()))
        rows = ", ".join(map(str, sorted(known)[:20])) + (", ..." if len(known) > 20 else "")
        raise SettingError(
            f"{len(known)} images or more of split {split.name!r} cannot be decoded (rows {rows}; "
            f"{split.describe_bad(row, reason)}): repair or remove them, or raise max_bad_images "
            f"({most})"
        )
    for row, reason in new.items():
        logger.warning("left out: %s", split.describe_bad(row, reason))


@dataclass(frozen=True, eq=False)
class ImageSplit:
    """Encoded images and labels of one split, as loader processes receive them."""

    table: datasets.Dataset  # rows as `datasets` reads them, images not decoded
    rows: np.ndarray  # row of each sample in the table, int64 [N]
    labels: np.ndarray  # class of each sample, int64 [N]
    image_column: str
    dataset: str  # as the user named it
    name: str  # the split's
    bits: int = field(default=16, kw_only=True)  # of a value, if more than 8
    bad: BadRows = field(default_factory=dict, kw_only=True)  # rows left out, and why

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, samples: np.ndarray) -> ImageSplit:
        """Return the split of these samples."""
        return replace(self, rows=self.rows[samples], labels=self.labels[samples])

    def spread(self, most: int) -> np.ndarray:
        """Return at most `most` evenly spread samples, int64."""
        return np.unique(np.linspace(0, len(self) - 1, most).astype(np.int64))

    def read(
        self, samples: np.ndarray, decode: Callable[[Image.Image, int], Any], bad: dict[int, str]
    ) -> Iterator[tuple[int, Any]]:
        """Yield the place of each of these samples, and what `decode` returns for its image.

        It gets the opened image, not yet decoded if possible, and the place. Images that fail are
        skipped: `bad` gets their rows and the reasons.
        """
        for begin in range(0, len(samples), _CHUNK):
            some = samples[begin : begin + _CHUNK]
            for place, value in enumerate(self._values(some), begin):
                try:
                    made = decode(self._open(value), place)
                except Exception as error:  # Pillow raises OSError, SyntaxError and more
                    words = words_of(error, None)
                    bad[int(self.rows[samples[place]])] = _BUFFER.sub("", words)
                else:
                    yield place, made

    def describe_bad(self, row: int, reason: str) -> str:
        """Return which image cannot be decoded, and why."""
        path = (self.table[row][self.image_column] or {}).get("path")
        file = f", {path}," if path else ""
        where = f"image {row} of split {self.name!r} of dataset {self.dataset!r}"
        return f"{where}{file} cannot be decoded ({reason})"

    @cached_property
    def _roots(self) -> tuple[str, ...]:
        """Folders that may hold images, also with links resolved, as `datasets` does."""
        here = Path(self.dataset).expanduser()
        roots = [here.parent if here.is_file() else here] if here.exists() else []
        roots += [datasets.config.HF_CACHE_HOME, datasets.config.HF_DATASETS_CACHE]
        roots.append(hub.HF_HUB_CACHE)
        forms = (os.path.abspath, os.path.realpath)
        return tuple(os.path.join(form(root), "") for root in roots for form in forms)

    def _check_path(self, path: str) -> None:
        """Refuse paths outside `_roots`: a stranger's table may name any file, or a URL."""
        place = os.path.abspath(path.rpartition("::")[2].removeprefix("file://"))
        if not place.startswith(self._roots):
            raise SettingError(f"path must be inside the dataset's folder, got {path}")

    def __getitem__(self, request: Request) -> Loaded:
        """Return a batch: images, uint8 [b, R, R, 3], their places in it, int64 [b], and bad rows.

        An exception would reach the trainer as a loader process's traceback in a message.
        """
        samples, transform, epoch = request
        drawn, side = transform.drawn(samples, epoch), transform.resolution
        pixels, places, bad = np.empty((len(samples), side, side, 3), np.uint8), [], {}

        def decode(image: Image.Image, place: int) -> Image.Image:
            return transform.taken(image, drawn[place], self.bits)

        for place, image in self.read(samples, decode, bad):
            if transform.augment == "timm":  # a failure here is not the image's fault
                image = transform.augmented(image, int(samples[place]), epoch)
            pixels[len(places)] = image
            places.append(place)
        images, decoded = torch.from_numpy(pixels[: len(places)]), torch.tensor(places).long()
        if get_worker_info():  # now, so an error reaches the trainer; else a thread would do it
            images, decoded = images.share_memory_(), decoded.share_memory_()
        return images, decoded, bad

    def _values(self, samples: np.ndarray) -> list[Stored]:
        return self.table[self.rows[samples]][self.image_column]

    def _open(self, value: Stored) -> Image.Image:
        """Return an image, not yet decoded if possible."""
        if value is None or value["bytes"] is value["path"] is None:
            raise SettingError("it is null")
        content, path = value["bytes"], value["path"]
        if content is None:
            beside = os.path.join(self._roots[0], path)  # a table's paths start at its folder
            path = beside if os.path.isfile(beside) else path
            self._check_path(path)
            if Path(path).is_file():
                content = Path(path).read_bytes()
        if content is None:  # inside an archive
            return datasets.Image().decode_example(value)
        image = Image.open(io.BytesIO(content))
        turned = image.getexif().get(_ORIENTATION, 1) != 1  # else it remains undecoded
        return ImageOps.exif_transpose(image) if turned else image


def decode_cached(
    split: ImageSplit, side: int, max_bad: int
) -> tuple[np.ndarray, ImageSplit] | None:
    """Return the pixels of a split's decodable images, uint8 [N, S, S, 3], and the split of these.

    They come from the cache if possible: on the CPU, processes that read it share its memory. None:
    an image has another size.
    """
    cache, shape = _cache_file(split), (len(split), side, side, 3)
    with contextlib.suppress(Exception):  # no file, or one whose header is damaged in some way
        pixels = np.load(cache, mmap_mode="c", allow_pickle=False)
        if pixels.shape == shape and pixels.dtype == np.uint8:
            return pixels, split
    pixels, good, bad = np.empty(shape, np.uint8), [], {}
    every = np.arange(len(split))
    for sample, image in split.read(every, lambda image, _: as_rgb(image, split.bits), bad):
        if image.size != (side, side):
            return None
        pixels[sample] = image
        good.append(sample)
    note_bad({}, bad, max_bad, split)
    if bad:
        return pixels[good], replace(split.select(np.array(good)), bad=bad)
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        write_with(cache, lambda path: _save(path, pixels))
    except OSError as error:
        logger.warning("decoded images are not cached (%s)", error)
    return pixels, split


def _save(path: Path, pixels: np.ndarray) -> None:
    with path.open("wb") as file:  # NumPy would add an ending to a path
        np.save(file, pixels, allow_pickle=False)


def _cache_file(split: ImageSplit) -> Path:
    """Return the cache file of a split's pixels, named by a hash of all that they depend on."""
    files = [file["filename"] for file in split.table.cache_files]
    if not files:  # a list of image files, or images in memory
        stored = split.table[split.image_column][:]
        files = [v["path"] for v in stored if v and v["path"] and v["bytes"] is None]
    stats = map(os.stat, files)
    content = (
        _CACHE_FORMAT,
        split.table._fingerprint,  # it says how the rows were made
        [(file.st_size, file.st_mtime_ns) for file in stats],  # a folder may be saved again
        split.image_column,
        split.bits,
    )
    digest = hashlib.sha256(repr(content).encode() + split.rows.tobytes()).hexdigest()
    return Path(datasets.config.HF_DATASETS_CACHE) / "dbsl" / f"pixels-{digest[:32]}.npy"


# A stop signal may reach all processes of a run at once: Ctrl-C from a terminal, SIGTERM from
# `timeout` and launchers. The run then finishes its step, and needs its loader processes for it.
# They, and the fork server that makes them, therefore heed these signals only from the run.


def _start_server() -> None:
    """Start the process that makes loader processes, unless it is running.

    It and the processes that it makes inherit the blocked signals.
    """
    if _FORKS:
        multiprocessing.set_forkserver_preload(_IMPORTS)  # once, for all loader processes
    if not _TELLS_SENDER:
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        resource_tracker.ensure_running()  # else the server would; it unblocks some signals
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with_parent(_: int) -> None:
    """End this loader process when the process that it serves is gone, or ends it.

    DataLoader itself watches only the fork server, which lives as long as its processes.
    """
    parent = multiprocessing.parent_process()

    def asked() -> None:
        while signal.sigwaitinfo(STOP_SIGNALS).si_pid != parent.pid:
            pass

    def end_after(wait: Callable[[], object]) -> None:
        wait()
        os._exit(1)  # sys.exit would end only the thread

    for wait in (parent.join, asked) if _TELLS_SENDER else (parent.join,):
        threading.Thread(target=end_after, args=(wait,), daemon=True).start()
