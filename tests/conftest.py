import os
import re
import time

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # before datasets is imported: tests use no network
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser):
    parser.addoption("--minutes", type=float, help="skip what would begin, or may end, later")


def pytest_configure(config):
    """Hide GPUs from all tests but those that are asked for with ``-m gpu``: the rest is gloo's."""
    if not _asked_for("gpu", config):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if not config.getoption("numprocesses", None):  # where tests run, and not beside that
        import hypothesis

        config.pluginmanager.import_plugin("tests.fixtures")
        hypothesis.settings.load_profile("nightly" if _asked_for("slow", config) else "short")
    if minutes := config.getoption("minutes", None):
        # xdist's processes are configured later, and get the environment of the first.
        os.environ.setdefault("PYTEST_END", str(time.time() + 60 * minutes))


def pytest_runtest_setup(item):
    limit = item.get_closest_marker("timeout")
    may_last = limit.args[0] if limit else 0
    if time.time() + may_last > float(os.environ.get("PYTEST_END", "inf")):
        pytest.skip("not run: the time given by --minutes")


def pytest_collection_modifyitems(config, items):
    """Leave out what is for ``-m slow``, unless that asks for it."""
    if not _asked_for("slow", config):
        left = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in {*left}]


def _asked_for(marker, config):
    return re.search(rf"(?<!not )\b{marker}\b", config.option.markexpr or "") is not None
