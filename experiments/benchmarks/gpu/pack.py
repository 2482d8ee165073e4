"""What to carry to a machine with a GPU and no network: images and wheels, in pieces.

Every piece has the wheels, and a part of the images that stands for all of them: a call may have to
do with one piece. Pieces that lie on the machine from a call before are used as well.
"""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, packages_distributions, requires, version
from pathlib import Path

import numpy as np
from packaging.requirements import Requirement

from experiments.benchmarks.gpu.data import SPLITS, pack_rows
from experiments.benchmarks.gpu.runner import AT_ONCE, ROOT, Stage

MIB = 2**20
PYTHON = "3.12"
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux2014_x86_64")
# What an image with PyTorch for a GPU usually has, and what the stand-in is for.
_THERE = """
accelerate datasets filelock fsspec huggingface-hub hypothesis jinja2 matplotlib mpmath
networkx numpy packaging pandas pillow psutil pyarrow pytest pytest-timeout pyyaml
requests safetensors scikit-learn scipy setuptools sympy tensorboard timm torch
torchvision tqdm triton typing-extensions wandb
"""
_OPTIONAL = {"trackio"}  # modules that a run does without
_RESERVE_BYTES = MIB // 4  # what the format itself takes of a piece


@dataclass(frozen=True)
class Piece:
    """Files that travel together."""

    path: Path
    images: dict[str, int]  # by split
    bytes: int


def pack(target: Path, data: Path | None, piece_bytes: int, *, wheels: bool = True) -> list[Piece]:
    """Write the pieces into a new folder.

    Args:
        target: The folder.
        data: Folder of parquet files, as the hub has them; None: wheels alone.
        piece_bytes: Most bytes of a piece.
        wheels: Whether to download wheels.

    Raises:
        ValueError: If a piece cannot hold even the wheels.
    """
    if target.exists() and any(target.iterdir()):
        raise ValueError(f"--pack must be a new or empty folder, got {target}")
    first = target / "piece-0"
    first.mkdir(parents=True)
    wheels = wheels and bool(missing_packages())
    if wheels:
        download_wheels(first / "wheels")
    room = piece_bytes - _size(first) - _RESERVE_BYTES
    if room <= 0:
        raise ValueError(f"--piece-mib must hold the wheels, {_size(first) / MIB:.1f} MiB, too")
    splits = dict(_read(data)) if data else {}
    total = sum(len(image) + 16 for images, _, _ in splits.values() for image in images)
    count = max(1, -(-total // room))
    pieces = []
    for number in range(count):
        folder = target / f"piece-{number}"
        if number:
            folder.mkdir()
            if wheels:
                shutil.copytree(first / "wheels", folder / "wheels")
        sizes = {}
        for name, (images, labels, facts) in splits.items():
            rows = np.arange(number, len(images), count)
            pack_rows(folder / f"{name}-{number}.npz", images, labels, rows, facts)
            sizes[name] = len(rows)
        pieces.append(Piece(folder, sizes, _size(folder)))
    return pieces


def imported_packages(names: Iterable[str] = ("train",)) -> set[str]:
    """Return the top-level modules that this project's modules import, of other projects."""
    found: set[str] = set()
    seen: set[str] = set()
    extras = (ROOT / "dbsl/extras").rglob("*.py")  # which no import names
    left = [*names, *(".".join(path.relative_to(ROOT).with_suffix("").parts) for path in extras)]
    while left:
        name = left.pop()
        path = ROOT / Path(*name.split("."))
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if name in seen or not file.exists():
            continue
        seen.add(name)
        for other in _imports(ast.parse(file.read_text(encoding="utf-8"))):
            top = other.partition(".")[0]
            if (ROOT / top).is_dir() or (ROOT / f"{top}.py").exists():
                left.append(other)
            elif top not in sys.stdlib_module_names:
                found.add(top)
    return found


def missing_packages(there: Iterable[str] = tuple(_THERE.split())) -> dict[str, str]:
    """Return packages, with the versions here, that train.py imports and that are not there."""
    owners = packages_distributions()
    there = set(there)
    imported = imported_packages() - _OPTIONAL
    left = [owner for name in imported for owner in owners.get(name, [name])]
    found: dict[str, str] = {}
    while left:
        name = left.pop().lower().replace("_", "-")
        if name in there or name in found:
            continue
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            raise ValueError(f"{name} must be installed here, to know its version") from None
        needs = [Requirement(text) for text in requires(name) or ()]
        machine = {"python_version": PYTHON, "sys_platform": "linux", "extra": ""}
        left += [n.name for n in needs if n.marker is None or n.marker.evaluate(machine)]
    return dict(sorted(found.items()))


def download_wheels(folder: Path) -> None:
    """Download the wheels of the missing packages for the other machine."""
    platforms = [word for name in _PLATFORMS for word in ("--platform", name)]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", PYTHON, "--implementation", "cp", *platforms]
    command += ["--dest", str(folder), "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [*command, *(f"{name}=={number}" for name, number in missing_packages().items())],
        check=True,
    )


def install_wheels(data: Path, target: Path) -> list[str]:
    """Install the wheels of all pieces into a folder; return their names."""
    wheels = {path.name: path for path in sorted(data.glob("**/*.whl"))}
    if wheels:
        command = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--quiet"]
        command += ["--disable-pip-version-check", "--target", str(target)]
        subprocess.run([*command, *map(str, wheels.values())], check=True)
    return list(wheels)


def tracked_bytes() -> int:
    """Return the bytes of the repository's tracked files, which travel with every call."""
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    return sum((ROOT / name).stat().st_size for name in names if name and (ROOT / name).is_file())


def calls(stages: Iterable[Stage], seconds: float) -> Iterator[list[Stage]]:
    """Yield the stages that calls of so many seconds have time for, if all goes as expected."""
    found, ends = [], [0.0] * AT_ONCE  # when each place for a stage is free again
    for stage in stages:
        begins = max(ends) if stage.alone else min(ends)
        if found and begins + stage.expected_s > seconds:
            yield found
            found, ends, begins = [], [0.0] * AT_ONCE, 0.0
        found.append(stage)
        end = begins + stage.expected_s
        ends = [end] * AT_ONCE if stage.alone else [*sorted(ends)[1:], end]
    if found:
        yield found


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "lazy_import":
            yield node.args[0].value


def _read(folder: Path) -> Iterator[tuple[str, tuple[list[bytes], np.ndarray, dict]]]:
    """Yield each split's encoded images, labels of all columns of classes, and facts."""
    import datasets

    tables = datasets.load_dataset(str(folder))
    for split in SPLITS:
        table = tables[split]
        features = table.features
        image_column = next(n for n, f in features.items() if isinstance(f, datasets.Image))
        classes = {n: f for n, f in features.items() if isinstance(f, datasets.ClassLabel)}
        table = table.cast_column(image_column, datasets.Image(decode=False))
        facts = {
            "image_column": image_column,
            "classes": {name: feature.names for name, feature in classes.items()},
            "total": len(table),
        }
        images = [value["bytes"] for value in table[:][image_column]]
        labels = np.array([table[:][name] for name in classes], dtype=np.int64).T
        yield split, (images, labels, facts)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
