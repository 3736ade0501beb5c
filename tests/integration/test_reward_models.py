"""Whole runs on the tiny model whose rewards come from a model of their own."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from rlcore.data.tokenizer import encode_chat, load_tokenizer
from rlcore.testing.tiny_model import build_tiny_reward_model
from rlcore.tracking.curves import read_metrics

# A test may train twice.
pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(400)]

MODEL = "reward.reward_model"
COMMON = (
    "trainer.total_training_steps=2",
    "trainer.save_freq=-1",
    "trainer.val_before_train=true",
    "trainer.test_freq=-1",
    "actor_rollout_ref.rollout.full_determinism=true",
    f"{MODEL}.enable=true",
    f"{MODEL}.rollout.dtype=float32",
    f"{MODEL}.rollout.prompt_length=128",
    f"{MODEL}.rollout.response_length=16",
)
POOL = (f"{MODEL}.enable_resource_pool=true", f"{MODEL}.nnodes=1")
# The other mode that lends its devices to a reward model; so bare it gives what sync does.
LENT = (
    "trainer.v1.trainer_mode=colocate_async",
    "trainer.v1.colocate_async.num_warmup_batches=0",
    "trainer.v1.sampler.max_off_policy_threshold=1",
)

# A judge that was not trained says anything: its words only have to reach the reward.
JUDGE = """
import json, urllib.request

def compute_score(data_source, solution_str, ground_truth, extra_info, reward_router_address):
    # Greedy responses of a random model are all alike: the row's number makes questions differ.
    question = f"Rate {extra_info['index']}: {solution_str}"
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 6}
    request = urllib.request.Request(
        f"http://{reward_router_address}/v1/chat/completions", json.dumps(body).encode()
    )
    with urllib.request.urlopen(request) as answer:
        said = json.load(answer)["choices"][0]["message"]["content"]
    return {"score": sum(map(ord, said)) % 7 / 7, "said": said}
"""


def train(joined, name, *overrides):
    folder = joined.root / "runs-reward" / name
    code, output = joined.run(
        "train", "grpo-tiny", *COMMON, f"trainer.default_local_dir={folder}",
        f"trainer.runs_root={joined.root / 'runs-reward'}", *overrides,
    )  # fmt: skip
    assert code == 0, output[-6000:]
    return folder


@pytest.fixture(scope="module")
def reward_model(joined):
    path = joined.root / "models" / "tiny-reward"
    build_tiny_reward_model(path)
    return path


def generations(run):
    path = run / "generations" / "step-0000.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_reward_model_trains_alike_in_its_own_pool_and_on_the_training_devices(
    joined, reward_model
):
    scored = f"{MODEL}.model_path={reward_model}"
    own = train(joined, "own-pool", scored, *POOL)
    # What it said is what the model says.
    tokenizer = load_tokenizer(reward_model)
    model = AutoModelForSequenceClassification.from_pretrained(reward_model, dtype=torch.float32)
    for line in generations(own):
        messages = [
            {"role": "user", "content": line["prompt"]},
            {"role": "assistant", "content": line["responses"][-1]},
        ]
        ids = torch.tensor([encode_chat(tokenizer, messages, {}, is_open=False)])
        with torch.inference_mode():
            expected = model.eval()(input_ids=ids).logits[0, -1].item()
        assert line["score"] == pytest.approx(expected, abs=1e-5)
    steps = [
        step for step in read_metrics(own / "metrics.jsonl").values() if "critic/score/mean" in step
    ]
    assert len(steps) == 2
    assert all(step["critic/score/max"] > step["critic/score/min"] for step in steps)

    shared = train(joined, "shared", scored, *LENT)
    assert [line["score"] for line in generations(shared)] == [
        line["score"] for line in generations(own)
    ]
    weights = [load_file(run / "model" / "model.safetensors") for run in (own, shared)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_judge_trains_in_its_own_pool(joined):
    (joined.root / "judge.py").write_text(JUDGE)
    run = train(
        joined, "judge", f"{MODEL}.model_path=models/tiny", *POOL,
        "reward.custom_reward_function.path=judge.py",
    )  # fmt: skip
    lines = generations(run)
    assert all(line["score"] == sum(map(ord, line["said"])) % 7 / 7 for line in lines)
    assert len({line["said"] for line in lines}) > 1
    steps = [
        step for step in read_metrics(run / "metrics.jsonl").values() if "critic/score/mean" in step
    ]
    assert any(step["critic/score/max"] > step["critic/score/min"] for step in steps)
