import json
import shutil

import pytest

from rlcore.data.tokenizer import cut_prompt, encode_chat, load_tokenizer, stop_token_ids
from rlcore.errors import DataError


def test_a_conversation_becomes_the_templates_tokens_once(tiny_root):
    tokenizer = load_tokenizer(tiny_root / "models" / "tiny")
    ids = encode_chat(tokenizer, [{"role": "user", "content": "a b"}], {})
    assert tokenizer.decode(ids) == "<|im_start|>user\na b<|im_end|>\n<|im_start|>assistant\n"
    # One token per character and per special token.
    assert len(ids) == 1 + len("user\na b") + 1 + 1 + 1 + len("assistant\n")


def test_template_arguments_reach_the_template(tiny_root):
    tokenizer = load_tokenizer(tiny_root / "models" / "tiny")
    tokenizer.chat_template = "{{ greeting }}{{ messages[0]['content'] }}"
    messages = [{"role": "user", "content": "x"}]
    assert tokenizer.decode(encode_chat(tokenizer, messages, {"greeting": "hi "})) == "hi x"


def test_every_configured_end_of_sequence_stops(tiny_root, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_root / "models" / "tiny", folder)
    tokenizer = load_tokenizer(folder)
    assert stop_token_ids(folder, tokenizer) == [2]
    for configured, expected in [(7, [2, 7]), ([9, 7], [2, 7, 9]), (None, [2])]:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": configured}))
        assert stop_token_ids(folder, tokenizer) == expected


def test_a_prompt_is_cut_as_verl_cuts_it():
    ids = list(range(10))
    assert cut_prompt(ids, 4, "left") == [6, 7, 8, 9]
    assert cut_prompt(ids, 4, "right") == [0, 1, 2, 3]
    assert cut_prompt(ids, 5, "middle") == [0, 1, 7, 8, 9]
    assert cut_prompt(ids, 1, "middle") == [9]
    for truncation in ("left", "right", "middle", "error"):
        assert cut_prompt(ids, 10, truncation) == ids
    with pytest.raises(DataError, match=r"10 tokens, more than data.max_prompt_length=9"):
        cut_prompt(ids, 9, "error")
