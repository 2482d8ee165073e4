import gc
import io
import json
import multiprocessing.forkserver
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

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
from dbsl.base.errors import SettingError
from dbsl.config.image_settings import ImageConfig
from dbsl.data.dataset import choose_columns, load_data, stratified_subset
from dbsl.data.images import ImageLoader, ImageSplit, PixelStore
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
TWO = {"left": datasets.Image(), "right": datasets.Image()}


@pytest.mark.parametrize(
    ("features", "chosen", "message"),
    [
        ({}, {"label_column": "x"}, r"be one of \['coarse', 'fine', 'target'\], got 'x'"),
        ({}, {"label_column": "image"}, "got 'image' of pil"),
        ({}, {"image_column": "fine"}, r"image_column must be one of \['image'\], got 'fine'"),
        ({"i": datasets.Image(), "t": TEXT}, {}, r"label_column must be one of \['t'\], got None"),
        (TWO, {}, r"image_column must be one of .*'right'\], got None"),
        (TWO, {"image_column": "right"}, r"whole numbers or text, got columns 'left' \(PIL"),
        (LISTS, {}, r"whole numbers or text, got columns 'image' \(dict\), 'label' \(list\)$"),
        ({"t": TEXT}, {}, r"dataset must have a column of images, got columns 't' \(string\)"),
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
            "label_column must be of one type .* in split 'test'",
        ),
        (
            lambda: {"train": of_plain("cat", "dog"), "test": of_plain("emu")},
            "split 'test' must be among the 2 classes .* got 'emu'",
        ),
        (
            lambda: {"train": of_classes(["cat"], [0] * 4)},  # as a single class folder is
            "must have two classes or more, got 'cat' alone",
        ),
        (lambda: {"train": of_classes("ab", [0])}, "2 images or more to hold some out, got 1"),
        (
            lambda: {"train_0": of_classes("ab", [0, 1]), "train_1": of_classes("ba", [0, 1])},
            "(same order, got others in column 'label' of .*-1|a split 'train' or only one, got)",
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


@pytest.mark.parametrize("missing", [None, -1])
def test_load_data_split_without_labels_is_left_out(tmp_path, caplog, missing):
    train = make_table([flat_image(0)] * 10)
    columns = {"image": [flat_image(0)] * 2, "label": [0, missing]}
    test = datasets.Dataset.from_dict(columns, features=train.features)
    data = load(save(tmp_path / "set", train=train, test=test))
    assert data.eval_split == "a fifth of train"
    assert "split 'test'" in caplog.text
    path = save(tmp_path / "other", train=test, test=train)
    with pytest.raises(ValueError, match=r"label_column must have a label .* in split 'train'"):
        load(path)


# --- where datasets come from


@pytest.mark.parametrize(
    "name", ["./nothing", "../nothing/here", "/nothing", "~/nothing-here", "a/b/c", "a b", "a/"]
)
def test_a_missing_folder_or_a_file_that_is_no_data_set_asks_no_hub(tmp_path, monkeypatch, name):
    monkeypatch.setattr(datasets, "load_dataset", lambda *_: pytest.fail("looked further"))
    (tmp_path / "photo.jpg").write_bytes(b"no table")
    for path, why in (
        (name, "the folder does not exist"),
        ("nothing.parquet", "the file does not exist"),
        (tmp_path / "photo.jpg", "it is a file whose name does not end in .parquet"),
    ):
        with pytest.raises(SettingError, match=rf"^dataset must be 'digits', .* \({why}\)$"):
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
    with pytest.raises(ValueError, match="does not exist on the Hub"):
        load("nobody/nothing")
    assert len(asked) == 1
    assert asked[0] <= 5
    assert inside == [(not answers, not answers)]
    assert not huggingface_hub.constants.HF_HUB_OFFLINE  # for an upload at the end of a run


@pytest.mark.parametrize("cache_gib", [None, 0.01])
def test_parquet_files_that_are_in_no_split_are_told(tmp_path, caplog, cache_gib):
    tables = {
        "cars": of_classes(["a", "b"], [0, 1] * 6),
        "cars_test": of_classes(["a", "b"], [0, 1] * 4),
    }
    data = load(str(write_parquet(tmp_path / "set", **tables)), cache_gib=cache_gib)
    assert len(data.train) + len(data.evaluation) == 8
    assert "are left out, for others have it: cars.parquet" in caplog.text


def test_one_parquet_file_is_told_of_no_others(tmp_path, caplog, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_parquet(tmp_path / "parquet", other=of_classes(["a", "b"], [0, 1]))
    write_parquet(tmp_path / "set", mine=of_classes(["a", "b"], [0, 1] * 4))
    load("set/mine.parquet")
    assert "left out" not in caplog.text


# --- folders of images


def make_files(folder, files):
    for number, name in enumerate(files):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".jpg":
            flat_image(number).save(path)
        else:
            path.write_text("id,label\n1.jpg,0\n")
    return str(folder)


CLASSES = [f"train/{name}/{n}.jpg" for name in ("cat", "dog") for n in range(5)]


@pytest.mark.parametrize("test", ["test/1.jpg", "test/unknown/1.jpg"])
@pytest.mark.parametrize("val", [[], ["val/cat/1.jpg", "val/cat/2.jpg"]])
def test_an_unlabelled_test_folder_is_left_out(tmp_path, caplog, val, test):
    data = load(make_files(tmp_path / "set", [*CLASSES, *val, test]))
    assert data.class_names[:2] == ("cat", "dog")
    assert (len(data.train), len(data.evaluation)) == ((10, 2) if val else (8, 2))
    assert data.eval_split == ("validation" if val else "a fifth of train")
    assert val or "split 'test'" in caplog.text


def of_each(*folders):
    return [f"{folder}/{n}.jpg" for folder in folders for n in range(5)]


@pytest.mark.parametrize(
    ("files", "counts", "classes"),
    [  # `datasets` would take files and folders at any depth for splits, by words in their names
        (of_each("train/train", "train/bus", "test/train", "test/bus"), (10, 10), ("bus", "train")),
        (of_each("train/a", "train/test-b", "test/a", "test/test-b"), (10, 10), ("a", "test-b")),
        (of_each("a", "test-b"), (8, 2), ("a", "test-b")),
        (of_each("train", "bus"), (8, 2), ("bus", "train")),
        ([*of_each("a", "b"), "a/test_1.jpg", "b/train_2.jpg"], (9, 3), ("a", "b")),
        (of_each("data/train2017/a", "data/train2017/b", "data/val2017/a"), (10, 5), ("a", "b")),
        (of_each("train/a", "train/b", "test/a", "more/c"), (10, 5), ("a", "b")),
        ([*of_each("data/train/a", "data/train/b", "data/test/a"), "x.jpg"], (10, 5), ("a", "b")),
        (of_each("d/train1/a", "d/train1/b", "d/val1/a", "d/unlabeled/x"), (10, 5), ("a", "b")),
        ([*of_each("train/a", "train/b", "test/a"), "train/a/__x.jpg"], (11, 5), ("a", "b")),
        ([*of_each("train/a", "train/b", "test/b"), "val/.keep"], (10, 5), ("a", "b")),
        (
            of_each("train [1]/a", "train [1]/b", "test/a", "test/test"),
            (10, 10),
            ("a", "b", "test"),
        ),
        (
            of_each("cars/a", "cars/b", "test-tubes/c", "test-tubes/d"),
            (16, 4),
            ("a", "b", "c", "d"),
        ),
    ],
)
def test_words_of_splits_in_names_of_classes_and_images_move_no_image(
    tmp_path, files, counts, classes
):
    path = make_files(tmp_path / "set", files)
    (tmp_path / "set" / files[0]).with_name("dead.jpg").symlink_to("nowhere")
    data = load(path)
    assert (len(data.train), len(data.evaluation)) == counts
    assert data.class_names == classes


def test_a_card_says_which_files_are_whose(tmp_path):
    files = of_each("one/train", "one/bus", "two/train", "two/bus", "three/train")
    path = make_files(tmp_path / "set", files)  # the third is nobody's
    splits = "{split: train, path: one/**}, {split: test, path: two/**}"
    (tmp_path / "set/README.md").write_text(
        f"---\nconfigs: [{{config_name: default, data_files: [{splits}]}}]\n---\n"
    )
    data = load(path)
    assert (len(data.train), len(data.evaluation)) == (10, 10)


@pytest.mark.parametrize(
    ("files", "cause"),
    [
        (["train/cat/1.jpg", "train/cat/2.jpg"], r"has training images in .*/train/cat\)$"),
        (["cat/1.jpg", "cat/2.jpg"], r"has training images in .*/cat\)$"),
        (["1.jpg", "2.jpg"], r"has training images in .*/set\)$"),
        (
            ["train/1.jpg", "metadata.csv"],
            r"metadata.csv next to the images, .* in .*/set/train\)$",
        ),
        (["images/1.jpg", "train.csv"], "a column of images, got columns 'id' .*'label'"),
        (["train/cat/1.jpg", "train/dog/x/1.jpg"], r"in .*/train/cat and .*/train/dog/x\)$"),
    ],
)
def test_a_folder_without_labels_says_what_it_lacks(tmp_path, files, cause):
    with pytest.raises(ValueError, match=rf"^dataset must .*{cause}"):
        load(make_files(tmp_path / "set", files))


def write_metadata(folder, line="file_name,label", name="{}.jpg", labels=("dog", "cat")):
    text = "".join(f"{name.format(n)},{labels[n % 2]}\n" for n in range(8))
    (folder / "metadata.csv").write_text(f"{line}\n{text}")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of `datasets`
@pytest.mark.parametrize("labels", [("0", "1"), ("0.5", "1.5")])
def test_labels_of_metadata_are_read_and_fractions_are_refused(tmp_path, labels):
    path = make_files(tmp_path / "set", [f"{n}.jpg" for n in range(8)])
    write_metadata(tmp_path / "set", labels=labels)
    if labels == ("0", "1"):
        assert load(path).class_names == labels
    else:
        with pytest.raises(ValueError, match=r"whole numbers or text, got .*'label' \(float64\)$"):
            load(path)
    gc.collect()  # of a file that `datasets` leaves open


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (("001", "2"), "'001' is taken for 1"),
        (("EU", "NA"), "'NA' is taken for missing"),
        (("1", "2"), None),
        (("a", "1"), None),
        (("true", "false"), None),
    ],
)
def test_labels_of_metadata_that_are_not_read_as_written_are_said(tmp_path, caplog, labels, said):
    path = make_files(tmp_path / "set", [f"{n}.jpg" for n in range(8)])
    write_metadata(tmp_path / "set", labels=labels)
    with suppress(SettingError):
        load(path)
    text = f"{path}/metadata.csv: label {said}: names with other letters are read as they are"
    assert [record.message for record in caplog.records] == [text] * (said is not None)
    gc.collect()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("holdout", [None, 0.25])
def test_images_without_a_row_in_a_csv_are_counted_and_left_out(tmp_path, caplog, holdout):
    path = make_files(tmp_path / "set", [*(f"train/{n}.jpg" for n in range(10)), "test/0.jpg"])
    write_metadata(tmp_path / "set/train")
    for _ in range(2):  # the second time from the cache of `datasets`
        caplog.clear()
        data = load(path, holdout=holdout)
        assert (len(data.train), len(data.evaluation)) == (6, 2)
        assert [record.message for record in caplog.records] == [
            "images of split 'train' without a row in a metadata.csv are left out: 2 of 10",
            "images of split 'test' without a row in a metadata.csv are left out: 1 of 1",
        ]
    gc.collect()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_csv_that_the_page_on_data_makes_is_read(tmp_path, monkeypatch):
    path = make_files(tmp_path / "flowers", [f"train/{n:04d}.jpg" for n in range(10)])
    rows = "".join(f"{n:04d},{'rose' if n % 2 else 'tulip'}\n" for n in range(10))
    (tmp_path / "flowers/train.csv").write_text("id,kind\n" + rows)
    page = (ROOT / "docs/data.md").read_text()
    monkeypatch.chdir(tmp_path)
    exec(re.search(r"### Labels in a CSV.*?```python\n(.*?)```", page, re.DOTALL)[1])
    data = load(path)
    assert data.class_names == ("rose", "tulip")
    assert len(data.train) + len(data.evaluation) == 10
    gc.collect()


@pytest.mark.parametrize(
    ("first_line", "name", "got"),
    [
        ("filename,label", "{}.jpg", "filename,label and 0.jpg,dog"),
        ("file_name,label", "{}", "file_name,label and 0,dog"),
        ("file_name,label", "x{}.png", "file_name,label and x0.png,dog"),
    ],
)
def test_a_csv_that_names_no_file_is_told_the_line_to_write(tmp_path, first_line, name, got):
    path = make_files(tmp_path / "set", [f"{n}.jpg" for n in range(10)])
    write_metadata(tmp_path / "set", first_line, name)
    line = r"/metadata.csv must begin with the line file_name,label and name a file in each row"
    with pytest.raises(SettingError, match=rf"{line}, such as 1.jpg,cat; got {got}\)$"):
        load(path)


@pytest.mark.parametrize("split", ["train", "val"])
def test_an_empty_class_folder_is_said(tmp_path, caplog, split):
    path = make_files(tmp_path / "set", [*CLASSES, "val/cat/1.jpg", "val/dog/1.jpg"])
    (tmp_path / "set" / split / "emu").mkdir()
    data = load(path, loader_workers=0)
    assert (data.class_names, data.mirror) == (("cat", "dog"), True)
    assert read_all(data.train) == ([*range(10)], [0] * 5 + [1] * 5)
    assert read_all(data.evaluation) == ([10, 11], [0, 1])
    assert f"class folders of {tmp_path}/set/{split} without an image: emu" in caplog.text


@pytest.mark.parametrize(("train", "test"), [("Train", "Test"), ("TRAINING", "TESTING")])
def test_split_folders_count_in_any_case(tmp_path, train, test):
    files = [f"{split}/{name}.jpg" for split in (train, test) for name in ("a/0", "a/1", "b/0")]
    data = load(make_files(tmp_path / "set", files))
    assert (len(data.train), len(data.evaluation), data.held_out) == (3, 3, "")
    assert data.class_names == ("a", "b")


def test_links_to_class_folders_are_said_not_to_be_followed(tmp_path, caplog):
    path = make_files(tmp_path / "set", CLASSES)
    (tmp_path / "set/train/emu").symlink_to(make_files(tmp_path / "elsewhere", ["1.jpg"]))
    assert load(path).class_names == ("cat", "dog")
    text = f"class folders of {tmp_path}/set/train that are links, and not followed: emu"
    assert text in caplog.text


def test_an_evaluation_split_with_another_image_column_is_left_out(tmp_path, caplog):
    tables = {name: make_table([flat_image(n) for n in range(9)], [0, 1, 2] * 3) for name in "ab"}
    other = tables["b"].rename_column("image", "picture")
    datasets.DatasetDict(train=tables["a"], test=other).save_to_disk(tmp_path)
    data = load(str(tmp_path), holdout=0.34)
    assert len(data.train) + len(data.evaluation) == 9
    assert f"split 'test' of '{tmp_path}' has no column 'image' and is left out" in caplog.text


@pytest.mark.parametrize("cache_gib", [None, 1.0])
@pytest.mark.parametrize("end", [".parquet", "/0.parquet"])
def test_parquet_files_that_train_for_their_capitals_are_said(tmp_path, caplog, cache_gib, end):
    for name in ("Train", "Test"):
        table = make_table([flat_image(n) for n in range(9)], [0, 1, 2] * 3)
        (path := tmp_path / f"{name}{end}").parent.mkdir(exist_ok=True)
        table.to_parquet(path)
    data = load(str(tmp_path), loader_workers=0, holdout=0.34, cache_gib=cache_gib)
    assert len(data.train) + len(data.evaluation) == 18
    text = "are for training, as only names in lower case make splits: Test"
    assert text + end.replace("/", "-") in caplog.text


def test_capitals_inside_a_split_are_no_matter(tmp_path, caplog):
    for name in ("train/Train-0", "test/Test-0"):
        (path := tmp_path / f"{name}.parquet").parent.mkdir()
        make_table([flat_image(n) for n in range(9)], [0, 1, 2] * 3).to_parquet(path)
    assert load(str(tmp_path)).eval_split == "test"
    assert caplog.text == ""


def test_a_bad_image_is_named_by_its_file(tmp_path, caplog):
    path = make_files(tmp_path / "set", CLASSES)
    (tmp_path / "set/train/dog/3.jpg").write_bytes(b"no image")
    source = load(path, max_store_bytes=0, loader_workers=0, max_bad_images=1).train
    list(source.batches([np.arange(8)], plain(8)))
    assert f"{tmp_path}/set/train/dog/3.jpg, cannot be decoded (cannot identify" in caplog.text
    assert "BytesIO" not in caplog.text


def test_load_data_broken_files_are_told_in_one_line(tmp_path, capfd):
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and no more")
    (tmp_path / "empty").mkdir()
    shards = write_parquet(tmp_path / "set", train_0=of_classes(["a", "b"], [0, 1]))
    (shards / "train-1.parquet").write_bytes(b"")
    for name, file in (("broken.parquet", "broken"), ("empty", ""), ("set", "train-1")):
        with pytest.raises(SettingError, match=rf"^dataset must be 'digits', .*{file}") as error:
            load(str(tmp_path / name))
        assert "\n" not in str(error.value)
    assert capfd.readouterr().err == ""  # where `datasets` has its own say


# --- stored pixels


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1"])
def test_load_data_images_of_other_modes_become_rgb(tmp_path, mode):
    image = flat_image(255).convert(mode) if mode in "P1" else flat_image(255, mode=mode)
    data = load(save(tmp_path / "set", train=make_table([image] * 10)))
    images, _ = read(data.train, plain(8))
    assert images.shape == (8, 3, 8, 8)
    assert (images == 255).all()


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
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            subprocess.run(["kill", f"-{number}", str(pid)], check=True)  # from another process
    assert len(list(batches)) == 6
    assert len(list(helped.batches(np.arange(24).reshape(6, 4), plain(8)))) == 6
    loaders[0].terminate()
    loaders[0].join(10)
    assert loaders[0].exitcode is not None


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
    bound = "max_bad_images must be at least the images that cannot be decoded, got 2 and 3 such in"
    where = r"split 'train' so far \(rows 2, 3, 11; image 11 of split 'train' of dataset '.*'"
    with pytest.raises(ValueError, match=rf"^{bound} {where} cannot be decoded \(.*\)\)$"):
        list(source.batches([np.array([10, 11])], plain(8)))
    source = load(path, loader_workers=loader_workers, max_bad_images=9).train
    with pytest.raises(ValueError, match="a batch must have an image that can be decoded, got 2 b"):
        list(source.batches([np.array([2, 3])], plain(8)))


def test_a_store_leaves_bad_images_out_up_to_a_limit(tmp_path, caplog):
    table = make_table([flat_image(9 * k, (8, 8)) for k in range(28)], 28)
    rows = encoded(table)
    for row in (2, 11):
        rows[row] = {"bytes": b"no image", "path": None}
    path = save(tmp_path / "set", train=make_table(rows, 28), test=table)
    data = load(path, max_bad_images=2)
    assert sorted(data.train.bad) == [2, 11]
    assert data.train.labels.tolist() == [k for k in range(28) if k not in (2, 11)]
    ((images, labels),) = data.train.batches([np.array([2])], plain(8))
    assert labels.tolist() == [3]
    ((expected, _),) = data.evaluation.batches([np.array([3])], plain(8))
    assert torch.equal(images, expected)
    with pytest.raises(ValueError, match=r"max_bad_images must be at least .* got 1 and 2 such"):
        load(path, max_bad_images=1)


@pytest.mark.parametrize(
    "path", ["/etc/hostname", "{}/outside.png", "https://example.org/x.png", "{}/set/inside.png"]
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


def test_a_folder_may_be_named_by_a_link(tmp_path):
    for number in range(10):
        file = tmp_path / "real" / "ab"[number % 2] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        flat_image(number).save(file)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    found = load(tmp_path / "link")
    assert (len(found.train), len(found.evaluation), found.image_side) == (8, 2, 8)


def test_data_to_evaluate_alone_are_evaluated_whole_unless_a_split_is_for_that(tmp_path):
    table = make_table([flat_image(n) for n in range(10)])
    save(tmp_path / "one", train=table)
    save(tmp_path / "two", train=table, test=make_table([flat_image(n) for n in range(4)]))
    for name, whole, count in (("one", False, 2), ("one", True, 10), ("two", True, 4)):
        config = ImageConfig(dataset=str(tmp_path / name))
        found = load_data(config, only_evaluate=whole)
        assert len(found.evaluation) == count
        assert bool(found.held_out) == (count == 2)


def test_a_saved_dataset_cannot_name_files_outside_of_its_folder(tmp_path):
    for name in ("set", "other"):
        save(tmp_path / name, train=make_table([flat_image(0)] * 4))
    state = tmp_path / "set/train/state.json"
    state.write_text(state.read_text().replace('"data-', '"../../other/train/data-'))
    with pytest.raises(ValueError, match="its data files must be inside the folder"):
        load(tmp_path / "set")


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
