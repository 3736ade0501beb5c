import pytest

from rlcore.testing.tiny_run import tiny_config


@pytest.fixture(scope="session")
def tiny_root(tmp_path_factory):
    root = tmp_path_factory.mktemp("tiny")
    tiny_config(root)
    return root


@pytest.fixture
def make_config(tiny_root, tmp_path):
    """Return the tiny preset with overrides; checked rows are kept in the test's own folder."""

    def make(**overrides):
        changed = {key.replace("__", "."): value for key, value in overrides.items()}
        return tiny_config(tiny_root, {"data.cache_dir": str(tmp_path / "cache"), **changed})

    return make
