import pytest

from dbsl.run.parse import in_todays_words


def test_a_removed_setting_is_read_at_its_default_alone():
    assert in_todays_words({"lr": 0.1, "damp_stale": False}) == {"lr": 0.1}
    with pytest.raises(ValueError, match="damp_stale was removed"):
        in_todays_words({"damp_stale": True})
