"""A data set class of the user's: made as verl makes it, its items are rows."""

import pytest

from rlcore.data.check import check_data
from rlcore.data.dataset import load_dataset
from rlcore.errors import ConfigError, DataError

MINE = """
import numpy as np

class Mine:
    def __init__(self, data_files, tokenizer, processor, config, max_samples=-1):
        self.prefix = f"{len(data_files)} {config.prompt_key} {tokenizer.eos_token}"
        self.size = 40 if max_samples < 0 else max_samples

    def __len__(self):
        return self.size

    def __getitem__(self, item):
        return {
            "raw_prompt": [{"role": "user", "content": f"{self.prefix} {item}"}],
            "data_source": "rollflow/letters",
            "reward_model": {"style": "rule", "ground_truth": "aeiou"},
            "extra_info": {"index": np.int64(item), "weights": np.array([0.5, 1.5])},
        }
"""


def custom(tmp_path, code, name="Mine"):
    path = tmp_path / "mine.py"
    path.write_text(code)
    return {"data__custom_cls__path": str(path), "data__custom_cls__name": name}


def test_its_items_are_the_rows(make_config, tmp_path):
    config = make_config(**custom(tmp_path, MINE), data__train_max_samples=30)
    dataset = load_dataset(config, "train")
    assert len(dataset) == 30
    row = dataset.row(7)
    assert row["raw_prompt"][0]["content"] == "1 prompt <|im_end|> 7"
    assert row["extra_info"] == {"index": 7, "weights": [0.5, 1.5]}
    assert dataset.origin(7) == f"{tmp_path}/mine.py row 7"


def test_changed_code_makes_other_rows(make_config, tmp_path):
    first = load_dataset(make_config(**custom(tmp_path, MINE)), "train")
    # Another file: a module is loaded once per process.
    other = tmp_path / "other"
    other.mkdir()
    changed = custom(other, MINE.replace("self.size = 40", "self.size = 20"))
    assert len(first) == 40
    assert len(load_dataset(make_config(**changed), "train")) == 20


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        ("class Other: ...", ConfigError, "defines no 'Mine'"),
        ("class Mine: ...", ConfigError, "must be a class with __len__ and __getitem__"),
        (MINE.replace("tokenizer, ", ""), DataError, "Mine cannot be made: TypeError"),
        (MINE.replace("return self.size", "return 0"), DataError, "Mine has no items"),
        (MINE.replace("return {", "item // 0; return {"), DataError,
         "mine.py row 0: Mine raised ZeroDivisionError"),
        (MINE.replace("return {", "return 3; {"), DataError, "row 0: Mine gave int, not a row"),
        (MINE.replace('"aeiou"', "None"), DataError, r"mine.py row 0: reward_model must be"),
        (MINE.replace("np.int64(item)", "object()"), DataError,
         "row 0: a value of type object is no JSON"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_it_is_named(make_config, tmp_path, code, error, message):
    with pytest.raises(error, match=message):
        check_data(make_config(**custom(tmp_path, code)))
