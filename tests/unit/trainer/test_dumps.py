"""All responses of a step or validation in files of the user's."""

import json

import pytest
import torch

from rlcore.data.tokenizer import load_tokenizer
from rlcore.errors import ConfigError
from rlcore.testing.ledger import failed_session, good_session
from rlcore.testing.queue import MemoryQueue
from rlcore.testing.tiny_run import tiny_config
from rlcore.trainer.dumps import dump_batch, dump_validation
from rlcore.trainer.prompt_source import PromptSource
from rlcore.types import SampledBatch


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return tiny_config(tmp_path_factory.mktemp("dumps"))


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(("inner_step", "name"), [(0, "3.jsonl"), (1, "3.1.jsonl")])
def test_every_trajectory_of_a_batch_is_written(config, tmp_path, inner_step, name):
    tokenizer = load_tokenizer(config.actor_rollout_ref.model.path)
    queue, key = MemoryQueue(), "train-0-5-ab_0_0"
    columns = {
        field: [torch.tensor([1, *tokenizer(text, add_special_tokens=False)["input_ids"]])]
        for field, text in (("prompts", "Say it"), ("responses", "\N{BULLET} aeiou"))
    }
    queue.put("r/train", [key], columns)
    tag = {"uid": "train-0-5-ab", "reward": 0.5, "reward_extra": {"acc": 1.0}}
    batch = SampledBatch(
        lease_id="l", global_step=3, inner_step=inner_step, uids=[tag["uid"]], keys=[key],
        tags=[tag], metrics={},
    )  # fmt: skip
    folder = tmp_path / "dumps"
    for _ in range(2):  # a phase may be run again
        dump_batch(str(folder), queue, "r/train", batch, PromptSource(config, "r"))
    assert lines(folder / name) == [
        {"acc": 1.0, "input": "Say it", "output": " aeiou", "gts": "aeiou", "score": 0.5,
         "step": 3, "key": key}
    ]  # fmt: skip


def test_a_validation_is_written_with_what_failed(config, tmp_path):
    [spec, *_] = PromptSource(config, "r").val_specs(global_step=2)
    settled = {spec.uid: [good_session(spec.uid, 0), failed_session(1)]}
    texts = {f"{spec.uid}_0_0": "four \N{GRINNING FACE}"}
    dump_validation(str(tmp_path), 2, [spec], settled, texts)
    good, bad = lines(tmp_path / "2.jsonl")
    assert (good["output"], good["score"], good["error"]) == ("four \N{GRINNING FACE}", 1.0, None)
    assert (bad["output"], bad["score"], bad["error"]) == (None, None, "row 7: ValueError: no")
    assert good["input"] == spec.raw_prompt[0]["content"]


def test_a_folder_that_cannot_be_written_is_named(config, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"trainer.validation_data_dir=.*cannot be written"):
        dump_validation(str(tmp_path / "file"), 2, [], {}, {})
