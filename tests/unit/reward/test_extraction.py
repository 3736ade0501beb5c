import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.reward.extraction import extract_last_integer, extract_stripped


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("3 + 4 = 7", "7"),
        ("The answer is 7.", "7"),
        ("It is 7, I think", "7"),
        ("15 - 43 = -28", "-28"),
        ("15-43", "43"),  # the minus is an operator
        ("15 - 43 = \N{MINUS SIGN}28", "-28"),
        ("=-28", "-28"),
        ("1,204 apples", "1204"),
        ("1,2,3", "3"),
        ("1,2041", "2041"),
        ("7.0", "7"),
        ("12 then 3.5", "12"),
        ("007", "7"),
        ("x2y", "2"),
        ("so...42", "42"),
        ("none", None),
        ("", None),
    ],
)
def test_last_integer(response, answer):
    assert extract_last_integer(response) == answer


@given(st.integers(-(10**9), 10**9), st.sampled_from(["{}", "= {}", "a {}.", "3 + 4 = {}\n"]))
def test_any_integer_is_found_at_the_end(number, form):
    assert extract_last_integer(form.format(number)) == str(number)


def test_stripped():
    assert extract_stripped("  a b\n") == "a b"
    assert extract_stripped(" \n") is None
