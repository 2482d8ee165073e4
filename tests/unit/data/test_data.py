import io
import json
import multiprocessing.forkserver
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock

import datasets
import huggingface_hub
import numpy as np
import pyarrow.parquet
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import dbsl.data.dataset
from dbsl.base.errors import ReadError, RunStopped, SettingError
from dbsl.base.machine import STOP_SIGNALS
from dbsl.config.image_settings import ImageConfig
from dbsl.data import images
from dbsl.data.dataset import load_data, stratified_subset
from dbsl.data.images import ImageLoader, ImageSplit
from dbsl.data.sources import PixelStore, as_source
from dbsl.data.tables import choose_columns
from dbsl.extras.streaming import StreamSettings
from dbsl.plan.sampler import EpochSampler
from tests.helpers import ROOT, make_table, plain, read, read_all, wait_until

# A test may ask for more loader processes than the machine has cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def load(dataset, seed=0, max_store_bytes=2**31, **settings):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dbsl.data.dataset, "STORE_BYTES", max_store_bytes)
        kind = StreamSettings if settings.get("cache_gib") else ImageConfig
        settings = {"max_bad_images": 0} | {n: v for n, v in settings.items() if v is not None}
        return load_data(kind(dataset=str(dataset), **settings), seed)


def flat_image(value, size=(8, 8), mode="RGB"):
    return Image.new(mode, size, value if mode == "L" else (value,) * len(mode))


def encoded(table):
    return table.cast_column("image", datasets.Image(decode=False))[:]["image"]


def save(path, **tables):
    datasets.DatasetDict(tables).save_to_disk(path)
    return str(path)


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    """60 images of 8x8, number i filled with the value 3*i, of three classes in turn."""
    images = [flat_image(3 * number) for number in range(60)]
    return save(tmp_path_factory.mktemp("numbered"), train=make_table(images, 3))


@pytest.fixture(scope="module")
def uneven(tmp_path_factory):
    """24 images of other sizes each, number i of the class i % 2, and 6 to evaluate on."""
    pixels = np.random.default_rng(0).integers(0, 256, (50, 70, 3), dtype=np.uint8)
    images = [Image.fromarray(pixels[: 20 + n, n:]) for n in range(24)]
    tables = {"train": make_table(images), "validation": make_table(images[:6])}
    return save(tmp_path_factory.mktemp("uneven"), **tables)


# --- subsets and splits


@given(
    labels=st.lists(st.integers(0, 6), min_size=1, max_size=80),
    share=st.floats(0, 1),
    seed=st.integers(0, 5),
)
def test_stratified_subset_is_exact_and_keeps_shares(labels, share, seed):
    labels = np.array(labels)
    size = round(share * len(labels))
    subset = stratified_subset(labels, size, np.random.default_rng(seed))
    assert subset.dtype == np.int64
    assert len(subset) == size
    assert (np.diff(subset) > 0).all()
    for label, count in zip(*np.unique(labels, return_counts=True), strict=True):
        assert abs((labels[subset] == label).sum() - size * count / len(labels)) < 1
    again = stratified_subset(labels, size, np.random.default_rng(seed))
    np.testing.assert_array_equal(subset, again)


def test_stratified_subset_equal_remainders_go_to_smaller_labels_and_any_member_may_be_taken():
    labels, rng = np.array([2, 2, 1, 1, 0, 0, 7]), np.random.default_rng(0)
    taken = [stratified_subset(labels, 2, rng) for _ in range(50)]  # 4/7, 4/7, 4/7 and 2/7
    assert all(sorted(labels[subset]) == [0, 1] for subset in taken)
    assert {*np.concatenate(taken)} == {2, 3, 4, 5}


def test_load_data_digits_holds_out_a_fifth():
    data = load("digits")
    assert (len(data.train), len(data.evaluation)) == (1437, 360)
    assert data.eval_split == "a fifth of train"
    assert data.class_names == tuple("0123456789")
    assert (data.num_classes, data.image_side, data.mirror) == (10, 8, False)
    counts = np.bincount(data.evaluation.labels)
    assert 34 <= counts.min() <= counts.max() <= 37  # of 174 to 183 of each class
    images, _ = read(data.train, plain(8))
    assert (images.min(), images.max()) == (0, 255)


def test_load_data_held_out_images_are_disjoint_from_train_also_of_a_subset(numbered):
    data, part = load(numbered), load(numbered, train_samples=9, eval_samples=4)
    (train, train_labels), (held_out, eval_labels) = map(read_all, (data.train, data.evaluation))
    assert sorted(train + held_out) == [3 * number for number in range(60)]
    assert len(held_out) == 12
    for values, labels in ((train, train_labels), (held_out, eval_labels)):
        assert labels == [value // 3 % 3 for value in values]
    assert train_labels == data.train.labels.tolist()
    assert (len(part.train), len(part.evaluation)) == (9, 4)
    assert set(read_all(part.train)[0]) < set(train)
    assert set(read_all(part.evaluation)[0]) < set(held_out)
    assert np.bincount(part.train.labels).tolist() == [3, 3, 3]
    again, other = (read_all(load(numbered, train_samples=9, seed=n).train) for n in (0, 1))
    assert again == read_all(part.train) != other


def test_load_data_holdout_evaluates_on_training_images_that_are_not_trained_on(tmp_path):
    table = make_table([flat_image(3 * n) for n in range(20)])
    test = make_table([flat_image(255)] * 2)
    folder = save(tmp_path / "set", train=table, test=test)
    data = load(folder, holdout=0.25, train_samples=8)
    train, held_out = (read_all(split)[0] for split in (data.train, data.evaluation))
    assert (len(train), len(held_out), data.eval_split) == (8, 5, "0.25 of train, held out")
    assert len({*train, *held_out}) == 13
    assert 255 not in held_out
    with pytest.raises(ValueError, match=r"train_samples must be in \[1, 15\], got 16"):
        load(folder, holdout=0.25, train_samples=16)


@pytest.mark.parametrize(("setting", "most"), [("train_samples", 48), ("eval_samples", 12)])
def test_load_data_impossible_sample_count_names_bound_and_value(numbered, setting, most):
    with pytest.raises(ValueError, match=rf"^{setting} must be in \[1, {most}\], got 5000$"):
        load(numbered, **{setting: 5000})
    assert len(load(numbered, **{setting: most}).train) == 48


def test_load_data_first_evaluation_split_wins_and_one_split_of_any_name_is_train(tmp_path):
    tables = {
        name: make_table([flat_image(value)] * 10)
        for name, value in (("test", 1), ("extra", 2), ("train", 3), ("valid", 4))
    }
    data = load(save(tmp_path / "set", **tables))
    assert data.eval_split == "valid"
    assert [{*read_all(split)[0]} for split in (data.train, data.evaluation)] == [{3}, {4}]
    tables["test"].save_to_disk(tmp_path / "table")
    for path in (save(tmp_path / "other", test=tables["test"]), tmp_path / "table"):
        data = load(path)
        assert (len(data.train), len(data.evaluation)) == (8, 2)


# --- columns and labels


def fine_and_coarse():
    return {
        "coarse": datasets.ClassLabel(names=["a", "b"]),
        "fine": datasets.ClassLabel(names=["a", "b", "c"]),
        "target": datasets.Value("int64"),
        "image": datasets.Image(),
    }


def columns_of(features, **chosen):
    return choose_columns(ImageConfig("none", **chosen), datasets.Features(features))


@pytest.mark.parametrize(
    ("change", "column"),
    [
        ({}, "fine"),
        ({"label": datasets.Value("int32")}, "label"),
        ({"label": datasets.Value("string")}, "label"),
        ({"label": datasets.Value("float32")}, "fine"),
        ({"coarse": datasets.Value("string"), "fine": datasets.Value("string")}, "target"),
        ({"coarse": datasets.Value("string"), "fine": datasets.ClassLabel(names=["a"])}, "fine"),
    ],
)
def test_label_column_is_found(change, column):
    features = fine_and_coarse() | change
    assert columns_of(features) == ("image", column)
    assert columns_of(features, label_column="coarse") == ("image", "coarse")


TEXT = datasets.Value("string")
STRUCT = {"bytes": TEXT, "path": TEXT}
LISTS = {"image": STRUCT, "label": datasets.List(datasets.Value("int64"))}
FLOATS = {"image": STRUCT, "label": datasets.Value("float32")}
BYTES = datasets.Value("binary")
TWO = {"left": datasets.Image(), "right": datasets.Image()}


@pytest.mark.parametrize(
    ("features", "chosen", "message"),
    [
        (
            {},
            {"label_column": "x"},
            r"no label column 'x'.* one of \['coarse', 'fine', 'target'\]",
        ),
        ({}, {"label_column": "image"}, "no label column 'image': its columns are"),
        (
            {},
            {"image_column": "fine"},
            r"no image column 'fine'.* one of \['image'\]",
        ),
        (
            {"i": datasets.Image(), "t": TEXT},
            {},
            r"no label column that is .* one of \['t'\]",
        ),
        (TWO, {}, r"no image column that is .* may be one of .*'right'\]"),
        (
            TWO,
            {"image_column": "right"},
            r"no label column .* its columns are 'left' \(PIL.* may be one of \[\]",
        ),
        (LISTS, {}, r"its columns are 'image' \(dict\), 'label' \(list\); .* cast_column\("),
        (FLOATS, {}, r"'label' \(float32\); .*Value\('int64'\)\) makes labels of numbers"),
        ({"t": BYTES}, {}, r"no image column .* 't' \(binary\); .*Image\(\)\) makes images"),
    ],
)
def test_missing_columns_are_answered_with_those_that_exist(features, chosen, message):
    with pytest.raises(SettingError, match=f"(?i){message}"):
        columns_of(features or fine_and_coarse(), **chosen)


def write_parquet(folder, **tables):
    folder.mkdir()
    for name, table in tables.items():
        table.to_parquet(folder / f"{name.replace('_', '-')}.parquet")
    return folder


def of_classes(names, labels):
    table = make_table([flat_image(0)] * len(labels), labels)
    return table.cast_column("label", datasets.ClassLabel(names=names))


def of_plain(*labels):
    table = make_table([flat_image(0)] * len(labels))
    return table.remove_columns("label").add_column("label", list(labels))


@pytest.mark.parametrize(("first", "second"), [("cat", "dog"), (-1, 70), (False, True)])
def test_load_data_plain_labels_are_numbered_in_order(tmp_path, first, second):
    path = save(tmp_path / "set", train=of_plain(second, first, second), test=of_plain(first))
    data = load(path)
    assert data.class_names == (str(first), str(second))
    assert data.train.labels.tolist() == [1, 0, 1]
    assert data.evaluation.labels.tolist() == [0]


def stored_load(path, stored, tables, **more):
    """Store tables in one of the three ways, and load them."""
    if stored == "streamed":
        more |= {"cache_gib": 1.0, "loader_workers": 0}
    return load((save if stored == "saved" else write_parquet)(path, **tables), **more)


STORED = pytest.mark.parametrize("stored", ["saved", "parquet", "streamed"])


@STORED
def test_classes_in_another_order_in_the_test_split_are_matched_by_name(tmp_path, stored):
    tables = {
        "train": of_classes(["dark", "light"], [0, 1, 0, 1]),
        "test": of_classes(["light", "dark"], [0, 0, 1]),
    }
    data = stored_load(tmp_path / "set", stored, tables)
    assert data.class_names == ("dark", "light")
    assert data.evaluation.labels.tolist() == [1, 1, 0]


@STORED
@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (
            lambda: {"train": of_classes("ab", [0, 1]), "test": of_classes("ac", [0, 1])},
            "split 'test' of .* has the label 'c', which is none of the 2 classes of split 'train'",
        ),
        (
            lambda: {"train": of_plain("cat", "dog"), "test": of_plain("emu")},
            "split 'test' of .* has the label 'emu', which is none of the 2 classes",
        ),
        (
            lambda: {"train": of_classes(["cat"], [0] * 4)},  # as a single class folder is
            "has only 'cat' in column 'label': it must have two classes or more",
        ),
        (lambda: {"train": of_classes("ab", [0])}, "2 images or more to hold some out, got 1"),
        (
            lambda: {"train_0": of_classes("ab", [0, 1]), "train_1": of_classes("ba", [0, 1])},
            "(-1.* has other columns .* than .*-0.*: write all|no split train, but .*: name one)",
        ),
    ],
)
def test_tables_that_do_not_fit_are_refused(tmp_path, stored, tables, message):
    with pytest.raises(SettingError, match=message):
        stored_load(tmp_path / "set", stored, tables())


def test_classes_that_are_not_evaluated_are_named_in_one_line(tmp_path, caplog):
    names = list("abcde")
    tables = {"train": of_classes(names, list(range(5))), "validation": of_classes(names, [0, 1])}
    load(save(tmp_path / "set", **tables))
    (record,) = caplog.records
    assert record.message == "classes without an evaluation image: c, d, e"


# --- what pyarrow and pandas write, without the types of `datasets`


def write_plain(folder, labels, nulls=(), missing=()):
    """Write a parquet file of images by number, some of which are null or have nothing in them."""
    count = len(labels)
    rows = encoded(make_table([flat_image(3 * n) for n in range(count)]))
    rows = [
        None if n in nulls else {"bytes": None, "path": None} if n in missing else row
        for n, row in enumerate(rows)
    ]
    kind = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    columns = {"image": pyarrow.array(rows, kind), "label": labels}
    folder.mkdir()
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "train.parquet")
    return str(folder)


@pytest.mark.parametrize("how", ["stored", "loaded", "streamed"])
def test_images_without_the_types_of_datasets_are_read_and_nulls_left_out(tmp_path, caplog, how):
    path = write_plain(tmp_path / "set", [5, 7] * 10, nulls=[0], missing=[3])
    more = {"stored": {}, "loaded": {"max_store_bytes": 0}, "streamed": {"cache_gib": 1.0}}[how]
    data = load(path, max_bad_images=2, loader_workers=0, **more)
    assert data.class_names == ("5", "7")
    for source in (data.train, data.evaluation):
        values, labels = read_all(source)
        assert labels == [value // 3 % 2 for value in values]
    assert sorted(data.train.bad | data.evaluation.bad) == [0, 3]
    for record in caplog.records:
        assert re.fullmatch("left out: image .* cannot be decoded \\(it is null\\)", record.message)
    assert len(caplog.records) == 2


@STORED
@pytest.mark.parametrize("missing", [None, -1])
def test_rows_without_labels_are_left_out_and_counted(tmp_path, caplog, stored, missing):
    def table(labels):
        images = [flat_image(3 * n) for n in range(len(labels))]
        columns = {"image": images, "label": labels}
        return datasets.Dataset.from_dict(columns, features=make_table(images).features)

    whole, part, none = [0, 1] * 5, [0, missing, 1, 0], [missing] * 4
    data = stored_load(tmp_path / "a", stored, {"train": table(part), "test": table(whole)})
    assert read_all(data.train) == ([0, 6, 9], [0, 1, 0])
    assert "split 'train' of " in caplog.text
    assert "rows without a label are left out, 1 of 4" in caplog.text
    data = stored_load(tmp_path / "b", stored, {"train": table(whole), "test": table(part)})
    assert read_all(data.evaluation) == ([0, 6, 9], [0, 1, 0])
    data = stored_load(tmp_path / "c", stored, {"train": table(whole), "test": table(none)})
    assert data.eval_split == "a fifth of train"
    assert "split 'test' of " in caplog.text
    with pytest.raises(SettingError, match=r"split 'train' of .* has no row with a label in"):
        stored_load(tmp_path / "d", stored, {"train": table(none), "test": table(whole)})


# --- where datasets come from


@pytest.mark.parametrize(
    "name", ["./nothing", "../nothing/here", "/nothing", "~/nothing-here", "a/b/c", "a b", "a/", ""]
)
def test_a_missing_folder_or_a_file_that_is_no_data_set_asks_no_hub(tmp_path, monkeypatch, name):
    monkeypatch.setattr(datasets, "load_dataset", lambda *_: pytest.fail("looked further"))
    (tmp_path / "photo.jpg").write_bytes(b"no table")
    monkeypatch.chdir(tmp_path)
    for path, why in (
        (name, r"cannot be opened \(.* does not exist here\): give 'digits', a folder"),
        ("photos.parquet", r"\(photos.parquet does not exist here, such as photo.jpg\)"),
        (
            tmp_path / "photo.jpg",
            "photo.jpg is no parquet file and no folder: give its folder; un",
        ),
    ):
        with pytest.raises(SettingError, match=why):
            load(path)


@pytest.mark.parametrize("answers", [True, False])
def test_the_hub_is_asked_once_and_not_again_if_it_does_not_answer(monkeypatch, answers):
    asked, inside = [], []

    def head(url, timeout):
        asked.append(timeout)
        if not answers:
            raise OSError("no route")

    def load_dataset(name):
        inside.append((huggingface_hub.constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE))
        raise FileNotFoundError("it does not exist on the Hub")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.utils, "get_session", lambda: SimpleNamespace(head=head))
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ValueError, match=r"nobody does not exist here; .* on the Hub"):
        load("nobody/nothing")
    assert len(asked) == 1
    assert asked[0] <= 5
    assert inside == [(not answers, not answers)]
    assert not huggingface_hub.constants.HF_HUB_OFFLINE  # for an upload at the end of a run


def test_one_parquet_file_is_told_of_no_others(tmp_path, caplog, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_parquet(tmp_path / "parquet", other=of_classes(["a", "b"], [0, 1]))
    write_parquet(tmp_path / "set", mine=of_classes(["a", "b"], [0, 1] * 4))
    load("set/mine.parquet")
    assert "left out" not in caplog.text


# --- folders of images


def test_the_csv_that_the_page_on_data_makes_is_read(tmp_path, monkeypatch):
    (tmp_path / "flowers/train").mkdir(parents=True)
    for n in range(10):
        flat_image(n).save(tmp_path / f"flowers/train/{n:04d}.jpg")
    rows = "".join(f"{n:04d},{'rose' if n % 2 else 'tulip'}\n" for n in range(10))
    (tmp_path / "flowers/train.csv").write_text("id,kind\n" + rows)
    page = (ROOT / "docs/train.md").read_text()
    monkeypatch.chdir(tmp_path)
    exec(re.search(r"### Labels in a CSV.*?```python\n(.*?)```", page, re.DOTALL)[1])
    data = load("flowers")
    assert data.class_names == ("rose", "tulip")
    assert len(data.train) + len(data.evaluation) == 10


def test_an_evaluation_split_with_another_image_column_is_left_out(tmp_path, caplog):
    tables = {name: make_table([flat_image(n) for n in range(9)], [0, 1, 2] * 3) for name in "ab"}
    other = tables["b"].rename_column("image", "picture")
    datasets.DatasetDict(train=tables["a"], test=other).save_to_disk(tmp_path)
    data = load(str(tmp_path), holdout=0.34)
    assert len(data.train) + len(data.evaluation) == 9
    assert f"split 'test' of '{tmp_path}' has no column 'image' and is left out" in caplog.text


# --- stored pixels


def test_pixel_store_statistics_are_those_of_its_pixels(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (10, 8, 8, 3), dtype=np.uint8)
    pixels[..., 2] = 77  # a channel without contrast must not be divided by zero
    images = [Image.fromarray(image) for image in pixels]
    table = make_table(images)
    data = load(save(tmp_path / "set", train=table, test=table))
    np.testing.assert_allclose(data.mean, pixels.mean((0, 1, 2)) / 255, rtol=1e-12)
    np.testing.assert_allclose(data.std[:2], pixels.std((0, 1, 2))[:2] / 255, rtol=1e-12)
    assert data.std[2] == 1e-3


def test_pixel_store_serves_batches_of_any_sizes_and_read_only_indices(numbered):
    data = load(numbered)
    steps = EpochSampler([10, 38]).steps(1, 0, 0, 9)  # views of a read-only permutation
    batches = [step.parts[0].indices for step in steps]
    sizes = [len(images) for images, _ in data.train.batches(batches, plain(8, "crop"))]
    assert sizes == [len(batch) for batch in batches]
    images, labels = read(data.train, plain(8), [[5], [1, 5, 1]])
    assert images[[0, 1]].flatten(1).tolist() == images[[2, 3]].flatten(1).tolist()
    assert labels.tolist() == data.train.labels[[5, 1, 5, 1]].tolist()
    assert labels.dtype == torch.int64


def test_tensors_that_a_model_of_images_is_evaluated_on_pass_no_transform(numbered):
    data, images = load(numbered), torch.rand(3, 3, 8, 8)
    source = as_source([(image, 0) for image in images], data, 8, "source")
    assert torch.equal(read(source, data.transform(8, "none", 0))[0], images)


def test_cache_spares_the_second_load_decoding(numbered, cache, monkeypatch):
    calls, open_ = [], ImageSplit._open
    monkeypatch.setattr(ImageSplit, "_open", lambda *given: calls.append(1) or open_(*given))
    first = load(numbered)
    decoded, probed = len(calls), 60  # all of them, and those whose size was looked at before
    assert decoded == 60 + probed
    second = load(numbered)
    assert len(calls) == decoded + probed
    assert read_all(second.train) == read_all(first.train)
    assert len(list(cache.iterdir())) == 2  # a file per split, nothing temporary


DAMAGE = {
    "empty": lambda content: b"",
    "short": lambda content: content[:-1],
    "garbage": lambda content: b"x" * len(content),
    "header": lambda content: content.replace(b"'shape': (", b"'shape': (("),
    "shape": lambda content: saved(np.load(io.BytesIO(content))[1:]),
    "type": lambda content: saved(np.load(io.BytesIO(content)).astype(np.int8)),
}


def saved(pixels):
    np.save(file := io.BytesIO(), pixels)
    return file.getvalue()


@pytest.mark.parametrize("damage", DAMAGE)
def test_cache_that_is_damaged_is_made_anew(numbered, cache, damage):
    expected = read_all(load(numbered).train)
    files = {path: path.read_bytes() for path in cache.iterdir()}
    for path, content in files.items():
        path.write_bytes(DAMAGE[damage](content))
    assert read_all(load(numbered).train) == expected
    assert {path: path.read_bytes() for path in cache.iterdir()} == files


def test_cache_that_cannot_be_written_costs_a_warning_only(numbered, cache, caplog):
    cache.parent.mkdir()
    cache.write_text("a file where the folder should be")
    assert len(load(numbered).train) == 48
    assert "decoded images are not cached" in caplog.text


def test_cache_of_a_folder_saved_anew_is_not_used(tmp_path):
    path = tmp_path / "set"
    for value in (10, 20):
        table = make_table([flat_image(value)] * 10)
        shutil.rmtree(path, ignore_errors=True)
        table._fingerprint = "0123456789abcdef"  # as of one generator whose data has changed
        data = load(save(path, train=table))
        assert set(read_all(data.train)[0]) == {value}


# --- which source


UNEVEN = [(8, 8)] * 102 + [(8, 9)] + [(8, 8)] * 97  # it is not among the 64 that are looked at


@pytest.mark.parametrize(
    ("sizes", "source"),
    [
        ([(64, 64)] * 5, PixelStore),
        ([(65, 65)] * 5, ImageLoader),
        ([(8, 9)] * 5, ImageLoader),
        (UNEVEN, ImageLoader),
    ],
)
def test_load_data_source_depends_on_the_sizes(tmp_path, sizes, source):
    images = [flat_image(number, size) for number, size in enumerate(sizes)]
    table = make_table(images)
    data = load(save(tmp_path / "set", train=table, test=table), loader_workers=0)
    assert isinstance(data.train, source)
    assert isinstance(data.evaluation, source)
    assert read_all(data.train)[0] == list(range(len(sizes)))
    width, height = sizes[0]
    assert data.image_side == (width if width == height else None)


def test_sources_agree_on_samples_and_labels(numbered):
    store = load(numbered, max_store_bytes=60 * 8 * 8 * 3)
    loader = load(numbered, max_store_bytes=60 * 8 * 8 * 3 - 1, loader_workers=0)
    assert isinstance(store.train, PixelStore)
    assert isinstance(loader.train, ImageLoader)
    assert loader.image_side == 8
    assert loader.mean == (0.485, 0.456, 0.406)
    assert read_all(store.train) == read_all(loader.train)
    assert read_all(store.evaluation) == read_all(loader.evaluation)


# --- loader


def test_image_loader_same_bits_for_any_batches_and_number_of_processes(uneven):
    transform, batches = plain(24, "crop"), [np.array([3, 8, 1]), np.arange(10, 24), np.array([2])]
    rng_state, children = torch.get_rng_state(), set(multiprocessing.active_children())
    alone = load(uneven, loader_workers=0).train
    helped = load(uneven, loader_workers=2).train
    helped.start()
    started = set(multiprocessing.active_children()) - children
    assert len(started) == 2  # there before the first batch
    for epoch in (0, 1):
        images, labels = read(alone, transform, epoch=epoch)
        assert labels.tolist() == [n % 2 for n in range(24)]
        others, other_labels = read(helped, transform, batches, epoch)
        order = np.concatenate(batches)
        assert torch.equal(images[order], others)
        assert torch.equal(labels[order], other_labels)
    assert not (images == read(alone, transform)[0]).flatten(1).all(1).any()
    assert torch.equal(torch.get_rng_state(), rng_state)
    assert set(multiprocessing.active_children()) - children == started  # the same in both epochs
    del helped
    assert set(multiprocessing.active_children()) <= children


def test_signals_that_ask_all_processes_to_stop_leave_loaders_to_the_run(uneven):
    helped = load(uneven, loader_workers=2).train
    batches = helped.batches(np.arange(24).reshape(6, 4), plain(8))  # they are starting
    loaders = helped._loader._iterator._workers
    server = multiprocessing.forkserver._forkserver._forkserver_pid
    for pid in (server, *(loader.pid for loader in loaders)):
        for number in STOP_SIGNALS:
            subprocess.run(["kill", f"-{number}", str(pid)], check=True)  # from another process
    assert len(list(batches)) == 6
    assert len(list(helped.batches(np.arange(24).reshape(6, 4), plain(8)))) == 6
    loaders[0].terminate()
    loaders[0].join(10)
    assert loaders[0].exitcode is not None


class Endless:
    resolution, augment = 8, "none"

    def drawn(self, *_):
        time.sleep(60)


def test_a_loader_process_that_died_or_never_brings_a_batch_ends_the_wait(uneven, monkeypatch):
    monkeypatch.setattr(images, "_LOOK_S", 0.1)
    helped = load(uneven, loader_workers=1).train
    helped.start(Mock(side_effect=[None, RunStopped]))  # a signal comes meanwhile
    with pytest.raises(RunStopped):
        next(helped.batches([np.arange(4)], Endless()))
    (loader,) = helped._loader._iterator._workers
    loader.kill()
    with pytest.raises(ReadError, match="a loader process died: memory may be short; lower --l"):
        helped._next(helped._loader._iterator)


def test_too_small_a_shared_memory_is_named_with_the_size_needed(uneven, monkeypatch, caplog):
    helped = load(uneven, loader_workers=2).train
    monkeypatch.setattr(images.shutil, "disk_usage", lambda path: Mock(free=2**20))
    numbers = np.arange(24).reshape(3, 8)
    must = "/dev/shm must have 9 MiB for the batches of loader processes, got 1 MiB free: docker"
    assert len(list(helped.batches(numbers, plain(350)))) == 3  # they were taken in time
    assert must in caplog.text

    def full(_):
        raise RuntimeError("unable to allocate shared memory(shm) for file <x>")

    with pytest.raises(ReadError, match=r"^/dev/shm must have 9 MiB"):
        helped._next(MagicMock(__next__=full))


def test_image_loader_new_call_ends_the_one_under_way(uneven):
    source = load(uneven, loader_workers=0).train
    batches = np.arange(24).reshape(6, 4)
    earlier = source.batches(batches, plain(8))
    next(earlier)
    assert len(list(source.batches(batches, plain(8)))) == 6
    with pytest.raises(RuntimeError, match="later call of batches"):
        next(earlier)
    assert list(source.batches([], plain(8))) == []


@pytest.mark.parametrize("loader_workers", [0, 1])
def test_image_loader_leaves_bad_images_out_up_to_a_limit(tmp_path, caplog, loader_workers):
    good = make_table([flat_image(9 * k, (99, 80)) for k in range(28)], 28)
    rows = encoded(good)
    for row in (2, 3, 11):
        rows[row] = {"bytes": rows[row]["bytes"][:60], "path": None}
    path = save(tmp_path / "set", train=make_table(rows, 28), test=good)
    source = load(path, loader_workers=loader_workers, max_bad_images=2).train
    first, second = list(source.batches([np.array([0, 2, 1]), np.array([3, 4])], plain(8)))
    assert first[1].tolist() == [0, 1]
    assert first[0].shape == (2, 3, 8, 8)
    assert second[1].tolist() == [4, 4]  # a single image would be none for batch norm
    assert sorted(source.bad) == [2, 3]
    assert "left out: image 2 of split 'train' of dataset" in caplog.text
    list(source.batches([np.array([2, 5])], plain(8)))  # the same one counts once
    what = r"3 images or more of split 'train' cannot be decoded \(rows 2, 3, 11; image 11 of split"
    remedy = r"repair or remove them, or raise max_bad_images \(2\)"
    with pytest.raises(ValueError, match=rf"^{what} .* cannot be decoded \(.*\)\): {remedy}$"):
        list(source.batches([np.array([10, 11])], plain(8)))
    source = load(path, loader_workers=loader_workers, max_bad_images=9).train
    with pytest.raises(ValueError, match="none of the 2 images of a batch can be decoded"):
        list(source.batches([np.array([2, 3])], plain(8)))


def test_a_store_leaves_bad_images_out_up_to_a_limit(tmp_path, caplog):
    table = make_table([flat_image(9 * k, (8, 8)) for k in range(28)], 28)
    rows = encoded(table)
    for row in (2, 11):  # cut off in the middle, or no image
        rows[row] = {"bytes": rows[row]["bytes"][:-30] if row == 2 else b"no image", "path": None}
    path = save(tmp_path / "set", train=make_table(rows, 28), test=table)
    data = load(path, max_bad_images=2)
    assert sorted(data.train.bad) == [2, 11]
    assert data.train.labels.tolist() == [k for k in range(28) if k not in (2, 11)]
    ((images, labels),) = data.train.batches([np.array([2])], plain(8))
    assert labels.tolist() == [3]
    ((expected, _),) = data.evaluation.batches([np.array([3])], plain(8))
    assert torch.equal(images, expected)
    with pytest.raises(ValueError, match=r"^2 images .* or raise max_bad_images \(1\)$"):
        load(path, max_bad_images=1)


@pytest.mark.parametrize(
    "path",
    [
        "/etc/hostname",
        "{}/outside.png",
        "../outside.png",
        "https://example.org/x.png",
        "{}/set/inside.png",
        "inside.png",
    ],
)
def test_a_table_cannot_name_files_outside_of_its_folder(tmp_path, path):
    (tmp_path / "set").mkdir()
    for name in ("outside.png", "set/inside.png"):
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    rows = encoded(make_table([flat_image(0)] * 20))
    rows[1] = {"bytes": None, "path": path.format(tmp_path)}
    table = make_table(rows).data.table
    # As it is: to_parquet would put the files' contents in.
    pyarrow.parquet.write_table(table, tmp_path / "set/train.parquet")
    if "inside" in path:
        assert len(load(tmp_path / "set/train.parquet").train) == 16
        return
    with pytest.raises(ValueError, match=r"path must be inside the dataset's folder, got"):
        load(tmp_path / "set/train.parquet")


def test_links_are_followed_but_not_in_circles_and_a_bad_file_is_named(tmp_path, caplog):
    for number in range(10):
        file = tmp_path / "real" / "ab"[number % 2] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        flat_image(number).save(file)
    for split in ("train", "test"):
        (tmp_path / "set" / split).mkdir(parents=True)
        for name in "ab":
            (tmp_path / "set" / split / name).symlink_to(tmp_path / "real" / name)
    (tmp_path / "real/a/again").symlink_to(tmp_path / "real/a")
    (tmp_path / "real/b/dead.png").symlink_to(tmp_path / "nowhere.png")
    (tmp_path / "real/b/self.png").symlink_to("self.png")
    (tmp_path / "real/b/bad.png").write_bytes(b"no image")
    (tmp_path / "link").symlink_to(tmp_path / "set")
    found = load(tmp_path / "link", max_bad_images=1)
    assert (len(found.train), len(found.evaluation), found.image_side) == (10, 10, 8)
    assert f"{tmp_path}/link/train/b/bad.png, cannot be decoded (cannot identify" in caplog.text
    assert "BytesIO" not in caplog.text
    assert found.class_names == ("a", "b")
    assert "left out are 4 links to nothing, 2 in test/b" in caplog.text
    assert load(tmp_path / "real", max_bad_images=1).class_names == ("a", "b")


@pytest.mark.parametrize(("most", "bits"), [(255, 8), (300, 12), (4095, 12), (65535, 16)])
def test_images_of_16_bits_are_scaled_alike_by_what_the_data_use(tmp_path, most, bits):
    images = [np.full((8, 8), value, np.uint16) for value in np.linspace(0, most, 10).astype(int)]
    images = [Image.fromarray(image) for image in images]
    data = load(save(tmp_path / "set", train=make_table(images), test=make_table(images)))
    loader = load(tmp_path / "set", max_store_bytes=0, loader_workers=0)
    expected = [int(np.max(image)) >> bits - 8 for image in images]
    assert read_all(data.train)[0] == read_all(loader.train)[0] == expected


def test_data_to_evaluate_alone_are_evaluated_whole_unless_a_split_is_for_that(tmp_path):
    table = make_table([flat_image(n) for n in range(10)])
    save(tmp_path / "one", train=table)
    save(tmp_path / "two", train=table, test=make_table([flat_image(n) for n in range(4)]))
    for name, whole, count in (("one", False, 2), ("one", True, 10), ("two", True, 4)):
        config = ImageConfig(dataset=str(tmp_path / name))
        found = load_data(config, only_evaluate=whole)
        assert len(found.evaluation) == count
        assert bool(found.held_out) == (count == 2)


SCRIPT = """
import json, multiprocessing, sys, time
import numpy as np
from tests.helpers import plain
from tests.unit.data.test_data import load

source = load(sys.argv[1], loader_workers=2).train
next(source.batches([np.arange(4)] * 3, plain(8, "crop")))
print(json.dumps([child.pid for child in multiprocessing.active_children()]), flush=True)
time.sleep(100)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").exists(), reason="looks for processes in /proc")
def test_image_loader_processes_end_with_a_script_that_is_killed(uneven):
    command = [sys.executable, "-c", SCRIPT, uneven]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as script:
        loaders = json.loads(script.stdout.readline())
        script.kill()
    assert len(loaders) == 2
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in loaders))
