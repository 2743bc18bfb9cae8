"""A count is a whole number; a comma groups thousands and is never a decimal point."""

import pytest

from kvlab.plan import make_plan


@pytest.mark.parametrize("text,count", [("8", 8), ("1,024", 1024), ("1_024", 1024), (16, 16)])
def test_counts_as_people_write_them(text, count):
    assert make_plan("llama-3-8b", batch=text).options.batch == count


@pytest.mark.parametrize("text", ["1,5", "1.5", "8,19", "1,0240", "-1", "0", "", "_1", "two"])
def test_what_is_no_count_is_refused(text):
    with pytest.raises(ValueError, match="batch"):
        make_plan("llama-3-8b", batch=text)
