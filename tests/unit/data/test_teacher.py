"""A teacher's folder: the policy's tokens, rows for them, any padding of the vocabulary."""

import json
import re
import shutil
from pathlib import Path

import pytest

from rlcore.data.check import check_model_folder
from rlcore.errors import DataError


@pytest.fixture
def taught(make_config, tmp_path):
    """Return a configuration with a teacher, a copy of the policy's folder that `spoil` changes."""

    def make(spoil=lambda folder: None):
        folder = tmp_path / "teacher"
        shutil.copytree(make_config().actor_rollout_ref.model.path, folder)
        spoil(folder)
        return make_config(
            distillation__enabled=True,
            distillation__teacher_models__teacher_model__model_path=str(folder),
        )

    return make


def edit(name: str, change):
    def spoil(folder: Path) -> None:
        values = json.loads((folder / name).read_text())
        change(values)
        (folder / name).write_text(json.dumps(values))

    return spoil


def swap(values) -> None:
    vocabulary = values["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


def add(values) -> None:
    token = {**values["added_tokens"][0], "id": 100, "content": "<|tool|>"}
    values["added_tokens"].append(token)


def test_the_same_tokenizer_is_taken_with_other_padding_and_no_template(taught):
    pad = edit("config.json", lambda values: values.update(vocab_size=128))

    def spoil(folder: Path) -> None:
        pad(folder)
        (folder / "chat_template.jinja").unlink()

    check_model_folder(taught(spoil))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (edit("tokenizer.json", swap), "2 of 100 tokens differ, first 'a': id 70 for the policy, "
         "71 for the teacher"),
        (edit("tokenizer.json", add), "1 of 101 tokens differ, first '<|tool|>': id none for the "
         "policy, 100 for the teacher"),
        (edit("config.json", lambda v: v.update(vocab_size=99)), "has 99 rows, but its tokenizer "
         "gives ids up to 99"),
        (edit("config.json", lambda v: v.update(max_position_embeddings=70)), "= 72 tokens, but"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no weights"),
        (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "no readable tokenizer"),
        (shutil.rmtree, "(distillation.teacher_models.teacher_model.model_path): no such folder"),
    ],
)  # fmt: skip
def test_another_teacher_is_refused(taught, tmp_path, spoil, message):
    with pytest.raises(DataError, match=re.escape(message)) as caught:
        check_model_folder(taught(spoil))
    assert str(tmp_path / "teacher") in str(caught.value)
