"""Tiny random models, one of each type per run."""

import zlib

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlcore.rollout.engine import EngineRequest
from rlcore.rollout.sampling_params import SamplingParams
from rlcore.rollout.transformers_engine import TransformersEngine


@pytest.fixture(autouse=True)
def one_thread():
    """Two threads on tensors this small mostly wait for each other; some tests ask for them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


SHAPES = {
    # Small, with grouped heads.
    "small": {
        "vocab_size": 300, "hidden_size": 96, "intermediate_size": 192,
        "num_attention_heads": 6, "num_key_value_heads": 2, "initializer_range": 0.15,
    },
    # Two layers of SmolLM2-135M: its matrix products, those of the main job.
    "smollm2": {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
        "num_attention_heads": 9, "num_key_value_heads": 3, "initializer_range": 0.06,
    },
}  # fmt: skip


def _save_model(folder, shape):
    """Save a random Llama; EOS is token 2."""
    config = LlamaConfig(
        num_hidden_layers=2, max_position_embeddings=512, tie_word_embeddings=True,
        bos_token_id=1, eos_token_id=2, pad_token_id=0, **SHAPES[shape],
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """The small model."""
    return _save_model(tmp_path_factory.mktemp("model"), "small")


@pytest.fixture(scope="session")
def engines(model_folder, tmp_path_factory):
    """Make an engine per kind, used again by every test: they end with nothing in flight."""
    made, folders = {}, {"small": model_folder}

    def get(dtype="float32", shape="small", num_threads=1):
        if shape not in folders:
            folders[shape] = _save_model(tmp_path_factory.mktemp(shape), shape)
        # Before the engine is made: it measures what holds at this number.
        torch.set_num_threads(num_threads)
        kind = (dtype, shape, num_threads)
        if kind not in made:
            made[kind] = TransformersEngine(str(folders[shape]), dtype, 16, 256, num_threads)
        return made[kind]

    return get


@pytest.fixture
def run():
    """Run requests to the end; `arrivals` maps a step number to what is added before it."""

    def run_to_the_end(engine, arrivals):
        arrivals = dict(arrivals)
        outputs, step = {}, 0
        while arrivals or engine.in_flight:
            for item in arrivals.pop(step, []):
                engine.check(item)
                engine.add(item)
            outputs.update(engine.step())
            step += 1
            assert step < 2000
        return outputs

    return run_to_the_end


@pytest.fixture
def request_of():
    """Make an engine request."""

    def make(name, prompt, **params):
        defaults = {"max_tokens": 24, "seed": zlib.crc32(name.encode()) % 1000, "ignore_eos": True}
        return EngineRequest(
            request_id=name, prompt_ids=list(prompt), params=SamplingParams(**defaults | params)
        )

    return make
