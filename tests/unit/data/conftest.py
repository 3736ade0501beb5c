import pytest

from rlcore.testing.tiny_run import tiny_config


@pytest.fixture(scope="session")
def tiny_root(tmp_path_factory):
    root = tmp_path_factory.mktemp("tiny")
    tiny_config(root)
    return root


@pytest.fixture
def make_config(tiny_root):
    """Return the tiny preset with overrides."""
    return lambda **overrides: tiny_config(
        tiny_root, {key.replace("__", "."): value for key, value in overrides.items()}
    )
