"""The model of the main job, from the package to an ordinary Hugging Face folder."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlcore.data.prepare import SMOLLM2_RECIPE, prepare_smollm2
from rlcore.data.staging import is_complete
from rlcore.data.tokenizer import encode_chat, load_tokenizer

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def test_the_converted_model_is_complete_and_can_add(tmp_path):
    folder = prepare_smollm2(tmp_path / "model")
    assert is_complete(folder, SMOLLM2_RECIPE)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert model.dtype == torch.bfloat16
    assert "quantization_config" not in model.config.to_dict()
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    tokenizer = load_tokenizer(folder)
    question = {"role": "user", "content": "What is 3 + 4? Answer with a number."}
    prompt = torch.tensor([encode_chat(tokenizer, [question], {})])
    with torch.inference_mode():
        generated = model.generate(prompt, max_new_tokens=12, do_sample=False)
    answer = tokenizer.decode(generated[0, prompt.shape[1] :])
    assert answer == "3 + 4 = 7<|im_end|>"
