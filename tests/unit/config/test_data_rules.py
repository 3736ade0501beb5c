"""Rules between the keys of section `data`."""

import pytest

from rlcore.config import load_config
from rlcore.config.load import examine

FILES = "data.train_files=[a.parquet,b.parquet]"


def problems_of(*overrides):
    return {problem.path: problem for problem in examine("grpo-tiny", list(overrides)).problems}


@pytest.mark.parametrize(
    ("overrides", "path", "reason", "involves"),
    [
        ([FILES, "data.train_weights=[1]"], "data.train_weights",
         "1 weights for 2 files", "data.train_files"),
        ([FILES, "data.train_weights=[1,0]"], "data.train_weights", "greater than 0", None),
        ([FILES, "data.train_weights=[1,2]", "data.sampler.class_name=success_rate"],
         "data.train_weights", "contradicts data.sampler.class_name=success_rate",
         "data.sampler.class_name"),
        ([FILES, "data.train_weights=[1,2]", "data.custom_cls.path=x.py",
          "data.custom_cls.name=X"],
         "data.train_weights", "contradicts data.custom_cls.path=x.py", "data.custom_cls.path"),
        (["data.custom_cls.path=x.py"], "data.custom_cls.name", "needs it",
         "data.custom_cls.path"),
        (["data.custom_cls.name=X"], "data.custom_cls.path", "needs it", "data.custom_cls.name"),
        (["data.sampler.class_path=x.py"], "data.sampler.class_name", "needs it",
         "data.sampler.class_path"),
        (["data.sampler.kwargs={floor:0.2}"], "data.sampler.kwargs", "no effect",
         "data.sampler.class_name"),
        (["data.truncation=centre"], "data.truncation", "input should be 'error'", None),
    ],
)  # fmt: skip
def test_what_contradicts_is_named_with_both_keys(overrides, path, reason, involves):
    problem = problems_of(*overrides)[path]
    assert reason in problem.reason
    if involves:
        assert involves in problem.involves


def test_keys_that_fit_are_taken():
    data = load_config(
        "grpo-tiny", [FILES, "data.train_weights=[1,2.5]", "data.truncation=middle"]
    ).data
    assert data.train_weights == (1, 2.5)
    assert data.truncation == "middle"
    sampler = ["data.sampler.class_name=success_rate", "data.sampler.kwargs={floor:0.2}"]
    assert load_config("grpo-tiny", sampler).data.sampler.kwargs == {"floor": 0.2}
