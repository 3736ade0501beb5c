"""Errors survive pickling; the registry refuses duplicates and lists names."""

import inspect
import pickle

import pytest

from rlcore import errors
from rlcore.errors import ConfigError, TransientError
from rlcore.registry import Registry

ALL = [c for _, c in inspect.getmembers(errors, inspect.isclass) if c.__module__ == errors.__name__]


@pytest.mark.parametrize("cls", ALL, ids=lambda c: c.__name__)
def test_every_error_survives_pickling_and_is_in_the_tree_of_the_docstring(cls):
    error = cls("what happened")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is cls
    assert again.args == ("what happened",)
    assert isinstance(again, errors.RLCoreError)
    assert cls.__name__ in (errors.__doc__ or "")


def test_user_errors_are_never_transient():
    assert not issubclass(ConfigError, TransientError)
    assert not issubclass(errors.DataError, TransientError)
    assert not issubclass(errors.FencedError, TransientError)
    assert issubclass(errors.DeadlineExceededError, TransientError)


def test_a_registry_lists_its_names_and_refuses_a_second_owner():
    registry: Registry[object] = Registry("loss")

    @registry.register("a")
    def first():
        return 1

    with pytest.raises(ConfigError, match=r"unknown loss 'b'; known: a"):
        registry.get("b")

    def second():
        return 2

    with pytest.raises(ConfigError, match="loss 'a' is registered twice"):
        registry.register("a")(second)
    assert registry.get("a") is first
    registry.register("a")(first)
    assert list(registry) == ["a"]
    assert "a" in registry
