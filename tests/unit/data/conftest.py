import shutil

import datasets
import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "hf_cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
    yield folder / "dbsl"
    shutil.rmtree(folder, ignore_errors=True)  # pytest keeps the rest for a look
