"""Hydra's override syntax, read into our tree."""

import pytest

from rlcore.config.overrides import Override, overrides_as_dict, parse_overrides
from rlcore.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("a.b=1", "a.b", 1),
        ("+a.b=1e-6", "a.b", 1e-6),
        ("++a.b=true", "a.b", True),
        ("a=null", "a", None),
        ("a=", "a", ""),
        ("a='1'", "a", "1"),
        ('a="x, y"', "a", "x, y"),
        ("a=[x,2,null]", "a", ["x", 2, None]),
        ("a={x:1,y:[p,q]}", "a", {"x": 1, "y": ["p", "q"]}),
        ("a=/data/set-1/train_2.parquet", "a", "/data/set-1/train_2.parquet"),
        ("a='$HOME is ${quoted}'", "a", None),
    ],
)
def test_values(text, path, value):
    parsed, problems = parse_overrides([text])
    if "${" in text:
        assert parsed == []
        assert "interpolation" in problems[0].reason
    else:
        assert parsed == [Override(path=path, value=value)]
        assert problems == []


def test_removal():
    assert parse_overrides(["~a.b"]) == ([Override(path="a.b", is_removal=True)], [])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a=1,2", "sweep"),
        ("a=range(1,3)", "sweep"),
        ("a@b=c", "config groups"),
        ("a=[1", "cannot be read"),
        ("no equals sign", "cannot be read"),
    ],
)
def test_refused_forms_say_why(text, reason):
    parsed, problems = parse_overrides([text, "ok=1"])
    assert parsed == [Override(path="ok", value=1)]
    assert [problem.path for problem in problems] == [text]
    assert reason in problems[0].reason
    assert problems[0].fix


def test_a_dict_is_taken_as_it_is():
    values = {"a.b": "1,2", "c": [1]}
    assert parse_overrides(values) == (
        [Override(path="a.b", value="1,2"), Override(path="c", value=[1])],
        [],
    )


def test_as_dict_keeps_the_last_value_and_its_place():
    assert list(overrides_as_dict(["a=1", "b=2", "a=3"]).items()) == [("b", 2), ("a", 3)]


def test_as_dict_refuses_what_a_dict_cannot_say():
    with pytest.raises(ConfigError) as caught:
        overrides_as_dict(["~a", "b=1,2"])
    assert "~a" in str(caught.value)
    assert "b=1,2" in str(caught.value)
