import pickle
import subprocess
import sys

import pytest

from rlcore.errors import ConfigError
from rlcore.user_code import load_user_module, load_user_modules, load_user_object


def test_a_file_is_executed_once_under_a_name_that_follows_from_its_path(tmp_path):
    path = tmp_path / "my code.py"
    path.write_text("class Thing:\n    value = 3\n")
    module = load_user_module(path)
    assert load_user_module(tmp_path / "." / "my code.py") is module
    other = tmp_path / "b"
    other.mkdir()
    (other / "my code.py").write_text("class Thing:\n    value = 4\n")
    assert load_user_module(other / "my code.py").Thing.value == 4
    assert load_user_modules([path]) == [module]


def test_objects_pickle_by_reference_into_a_process_that_loaded_the_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("class Thing:\n    value = 3\n")
    (tmp_path / "pickled").write_bytes(pickle.dumps(load_user_object(path, "Thing")()))
    code = (
        "import pickle, sys; from rlcore.user_code import load_user_module; "
        f"load_user_module({str(path)!r}); "
        f"print(pickle.load(open({str(tmp_path / 'pickled')!r}, 'rb')).value)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert out.stdout == "3\n"


def test_what_cannot_be_loaded_is_one_message(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing.py: no such Python file"):
        load_user_module(tmp_path / "nothing.py")
    path = tmp_path / "broken.py"
    path.write_text("1 / 0")
    for _ in range(2):  # a failed load leaves nothing behind
        with pytest.raises(ConfigError, match="cannot be imported: ZeroDivisionError") as caught:
            load_user_module(path)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
    path.write_text("x = 1")
    with pytest.raises(ConfigError, match="defines no 'y'; it defines x"):
        load_user_object(path, "y")
