"""The engine of reward models against transformers' own forward pass."""

import asyncio

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from rlcore.errors import ConfigError, WeightSyncError
from rlcore.rollout.classifier_engine import ClassifierEngine
from rlcore.rollout.client import LLMServerClient
from rlcore.rollout.engine import ENGINES, EngineRequest, EngineSpec
from rlcore.rollout.router import Router
from rlcore.rollout.sampling_params import SamplingParams
from rlcore.rollout.server import LLMServer
from rlcore.testing.tiny_model import build_tiny_model, build_tiny_reward_model

IDS = [[1, 40, 50, 60], [1, 70, 71], [1, *range(20, 60)]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("reward") / "model"
    build_tiny_reward_model(path)
    return path


def spec_of(folder, **changes):
    values = {
        "name": "transformers", "model_path": str(folder), "dtype": "float32", "max_num_seqs": 16,
        "max_model_len": 64, "num_threads": None, "task": "classify",
    }  # fmt: skip
    return EngineSpec(**{**values, **changes})


def expected(folder):
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return [model(input_ids=torch.tensor([ids])).logits[0].tolist() for ids in IDS]


def test_scores_are_those_of_the_model_in_whatever_company(folder):
    server = LLMServer(lambda: ENGINES.get("transformers")(spec_of(folder)), run_id="r")
    client = LLMServerClient(Router({"replica": server}), seed=0)

    async def run():
        await server.wait_ready(60)
        outputs = await asyncio.gather(
            *(client.generate(f"{i}", IDS[i % 3], {"max_tokens": 1}) for i in range(12))
        )
        await server.close()
        return [output.extra_fields["logits"] for output in outputs]

    scores = asyncio.run(run())
    assert scores == expected(folder) * 4
    assert len({tuple(score) for score in scores}) == 3


def test_what_cannot_be_scored_is_told(folder, tmp_path):
    engine = ClassifierEngine(spec_of(folder, max_model_len=3))
    params = SamplingParams(max_tokens=1)
    with pytest.raises(ConfigError, match="request a has 4 tokens, must have 1 to 3"):
        engine.check(EngineRequest(request_id="a", prompt_ids=IDS[0], params=params))
    engine.add(EngineRequest(request_id="a", prompt_ids=IDS[1], params=params))
    assert engine.in_flight == ["a"]
    assert engine.abort("a").stop_reason == "aborted"
    assert (engine.abort("a"), engine.step()) == (None, [])
    with pytest.raises(WeightSyncError, match="takes no weights"):
        engine.commit_weights(1)
    with pytest.raises(ConfigError, match=r"model_path=.*cannot be loaded"):
        ClassifierEngine(spec_of(tmp_path / "nothing"))


def test_a_model_without_a_head_is_refused(tmp_path):
    build_tiny_model(tmp_path / "policy", num_layers=1, width=32)
    with pytest.raises(ConfigError, match=r"score.weight are missing.*as a judge"):
        ClassifierEngine(spec_of(tmp_path / "policy"))
