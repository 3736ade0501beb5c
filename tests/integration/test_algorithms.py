"""Every name of an estimator, a loss and a correction trains the tiny model for two steps.

One worker, with one copy of the model, is kept for all of them; the configuration is read anew for
each name, as a run would read it, and what it asks for is made by the same phases. Whole runs over
Ray are in test_run.py, the worker as an actor in test_training_group.py.
"""

import pytest
import torch

from rlcore.config import load_config
from rlcore.config.names import kind_of
from rlcore.testing.queue import MemoryQueue
from rlcore.testing.tiny_model import VOWELS, build_tiny_model
from rlcore.trainer.advantage import AdvantageSpec, compute_advantage, copy_rollout_log_probs
from rlcore.training.spec import TrainingSpec
from rlcore.training.update import PolicyUpdater
from rlcore.training.worker import FORWARD_COLUMNS, TrainingWorker
from rlcore.types import CallKey, SampledBatch

RUN = "r"
TRAIN = "r/train"
LOSS = "actor_rollout_ref.actor.policy_loss."
CORRECTION = "algorithm.rollout_correction."
DISTIL = "distillation.distillation_loss."
TEACHER = "distillation.teacher_models.teacher_model.model_path"
VOWEL_IDS = [ord(letter) - 32 + 5 for letter in VOWELS]
GDPO = "algorithm.gdpo_reward_keys=[vowels,length]"
ESTIMATORS = kind_of("algorithm.adv_estimator").works
LOSSES = sorted({*kind_of(f"{LOSS}loss_mode").works} - {"bypass_mode"})
CORRECTIONS = {
    "tis token": ["rollout_is=token"],
    "tis sequence, normalised": ["rollout_is=sequence", "rollout_is_batch_normalize=true"],
    "geometric": ["rollout_is=geometric", "rollout_is_threshold=1.5"],
    "icepop": ["rollout_is=token", 'rollout_is_threshold="0.5_2.0"'],
    **{
        option: [f"rollout_rs={option}", f"rollout_rs_threshold={1.3 if 'k1' in option else 0.02}"]
        for option in (
            "token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
            "seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k1", "seq_max_k2", "seq_max_k3",
        )
    },
    "several": ["rollout_is=token", 'rollout_rs="token_k1,seq_mean_k3"',
                'rollout_rs_threshold="0.5_2.0,0.5"'],
    "bypass": ["bypass_mode=true"],
    "bypass, rejection": ["bypass_mode=true", "rollout_rs=token_k1", "rollout_rs_threshold=1.3"],
    "bypass, reinforce": ["bypass_mode=true", "loss_type=reinforce", "rollout_is=token"],
}  # fmt: skip


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model")
    build_tiny_model(folder, num_layers=1, width=32)
    return str(folder)


@pytest.fixture(scope="module")
def worker(model_path, tmp_path_factory) -> TrainingWorker:
    torch.set_num_threads(1)
    return TrainingWorker(spec_of(model_path, str(tmp_path_factory.mktemp("run"))))


def config_of(model_path: str, *overrides: str):
    shared = [
        f"actor_rollout_ref.model.path={model_path}",
        "actor_rollout_ref.actor.dtype=float32",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "ray.num_threads=1",
    ]
    return load_config("grpo-tiny", [*shared, *overrides])


def spec_of(model_path: str, folder: str, *overrides: str) -> TrainingSpec:
    config = config_of(model_path, *overrides)
    return TrainingSpec.from_config(config, run_id=RUN, attempt=1, folder=folder)


def sampled(
    worker: TrainingWorker, queue: MemoryQueue, key: CallKey, *, is_policys: bool = False
) -> SampledBatch:
    """Random responses of the tiny model's length, scored by their share of vowels.

    The engine's log-probs are the trainer's with some noise.

    Args:
        worker: Whose policy computes the old log-probs.
        queue: Gets the rows.
        key: Names the step, which seeds the random numbers.
        is_policys: Sample the responses from the policy, not evenly.
    """
    generator = torch.Generator().manual_seed(key.global_step)
    keys = [f"u{prompt}_{session}_0" for prompt in range(4) for session in range(4)]
    rows = {"prompts": [], "responses": [], "response_mask": []}
    for row in range(len(keys)):
        count = 3 + row % 3
        prompt = torch.arange(40, 46) + row // 4
        if is_policys:
            response = continued(worker, prompt, count, generator)
        else:
            response = torch.randint(4, 100, (count,), generator=generator)
            response[row % count] = VOWEL_IDS[row % 5]
        rows["prompts"].append(prompt)
        rows["responses"].append(response)
        rows["response_mask"].append((torch.arange(count) != 1).long())
    found, _ = worker.compute_log_prob(key, rows)
    noise = [torch.randn(len(r), generator=generator) * 0.2 for r in rows["responses"]]
    rollout = [old + n for old, n in zip(found["old_log_probs"], noise, strict=True)]
    tags, scores = [], []
    for key_, response in zip(keys, rows["responses"], strict=True):
        uid, session, _ = key_.split("_")
        vowels = sum(int(token) in VOWEL_IDS for token in response) / len(response)
        extra = {"vowels": vowels, "length": float(len(response))}
        tags.append(
            {
                "uid": uid,
                "session_id": int(session),
                "reward": vowels,
                "reward_extra": extra,
                "baseline": 0.3,
            }
        )
        scores.append(torch.zeros(len(response)))
        scores[-1][-1] = vowels
    values = [torch.full((len(r),), 0.1) for r in rows["responses"]]
    columns = {**rows, **found, "rollout_log_probs": rollout, "rm_scores": scores, "values": values}
    queue.put(TRAIN, keys, columns)
    return SampledBatch(lease_id="l", global_step=1, inner_step=0, uids=["u0", "u1", "u2", "u3"],
                        keys=keys, tags=tags, metrics={})  # fmt: skip


def continued(
    worker: TrainingWorker, prompt: torch.Tensor, count: int, generator: torch.Generator
) -> torch.Tensor:
    """Sample `count` tokens after a prompt."""
    ids = prompt
    for _ in range(count):
        layout = worker.policy.layout([ids], [ids[:1]])
        with torch.no_grad():
            logits = worker.policy.model(**layout.model_inputs).logits[0, layout.predictors[0]]
        chances = logits.softmax(-1)
        ids = torch.cat([ids, torch.multinomial(chances, 1, generator=generator)])
    return ids[len(prompt) :]


def train(
    worker: TrainingWorker,
    model_path: str,
    *overrides: str,
    steps: int = 2,
    is_policys: bool = False,
) -> list[dict[str, float]]:
    """Some steps under a configuration; return the metrics of each."""
    config = config_of(model_path, *overrides)
    spec = spec_of(model_path, worker.spec.folder, *overrides)
    worker.spec = spec
    worker.updater = worker.actor.updater = PolicyUpdater(worker.policy, spec)
    worker.actor.plan = spec.plan
    queue = MemoryQueue()
    metrics = []
    for _ in range(steps):
        step = worker.progress.num_inner_steps + 1
        key = CallKey(run_id=RUN, attempt=1, global_step=step)
        batch = sampled(worker, queue, key, is_policys=is_policys)
        if config.algorithm.rollout_correction.bypass_mode:
            copy_rollout_log_probs(queue, TRAIN, batch)
        found = compute_advantage(queue, TRAIN, batch, AdvantageSpec.from_config(config))
        if config.teacher_path is not None:
            read = queue.get(TRAIN, batch.keys, [*FORWARD_COLUMNS, "old_log_probs"])
            written, told = worker.compute_teacher_log_prob(key, read)
            queue.put(TRAIN, batch.keys, written)
            found |= told
        rows = queue.get(TRAIN, batch.keys, worker.updater.columns)
        before = weights(worker)
        found |= worker.update_actor(key, rows, [tag["uid"] for tag in batch.tags])
        assert found["actor/optimizer_steps"] >= 1 and found["actor/nonfinite_steps"] == 0
        assert found["actor/grad_norm"] > 0
        assert not torch.equal(weights(worker), before)
        metrics.append(found)
    return metrics


def weights(worker: TrainingWorker) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in worker.policy.model.parameters()])


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_trains(worker, model_path, name):
    extra = [GDPO] if name == "gdpo" else []
    train(worker, model_path, f"algorithm.adv_estimator={name}", *extra)


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_trains(worker, model_path, name):
    metrics = train(worker, model_path, f"{LOSS}loss_mode={name}")
    assert "actor/ppo_kl" in metrics[0]
    train(worker, model_path, f"{LOSS}loss_mode={name}", f"{LOSS}off_policy_delta=0.01")


@pytest.mark.parametrize("name", CORRECTIONS)
def test_every_correction_trains(worker, model_path, name):
    overrides = CORRECTIONS[name]
    metrics = train(worker, model_path, *(CORRECTION + override for override in overrides))
    asked = " ".join(overrides)
    is_bypass = "bypass" in asked
    assert ("rollout_corr/rollout_is_mean" in metrics[0]) == (
        "rollout_is=" in asked and not is_bypass
    )
    if "rollout_rs" in asked and not is_bypass:
        assert 0 <= metrics[0]["rollout_corr/rollout_rs_masked_fraction"] < 1


def test_options_of_losses_train(worker, model_path):
    train(worker, model_path, f"{LOSS}loss_mode=decoupled_ppo", f"{LOSS}decoupled_cap=1.2",
          f"{LOSS}decoupled_cap_mode=mask")  # fmt: skip
    train(worker, model_path, f"{LOSS}loss_mode=gspo", f"{CORRECTION}bypass_mode=true")


@pytest.fixture
def make_pupil(model_path, tmp_path):
    """Return a function: a worker of its own with a teacher, and what it was asked for."""

    def make(teacher_path: str, *overrides: str):
        asked = ["distillation.enabled=true", f"{TEACHER}={teacher_path}", *overrides]
        return TrainingWorker(spec_of(model_path, str(tmp_path), *asked)), asked

    return make


def distance(worker: TrainingWorker) -> float:
    """Exact KL(policy || teacher) of the first token, in nats, mean over the four prompts."""
    found = []
    for first in range(40, 44):
        prompt = torch.arange(first, first + 6)
        layout = worker.policy.layout([prompt], [prompt[:1]])
        with torch.no_grad():
            ours, theirs = (
                side.model(**layout.model_inputs).logits[0, layout.predictors[0]].log_softmax(-1)
                for side in (worker.policy, worker.teacher)
            )
        found.append((ours.exp() * (ours - theirs)).sum().item())
    return sum(found) / len(found)


WAYS = {
    "loss": [f"{DISTIL}loss_mode=k3"],
    "reward": [f"{DISTIL}use_policy_gradient=true", f"{DISTIL}loss_mode=k1"],
}


@pytest.mark.parametrize("way", WAYS)
def test_the_policy_comes_nearer_to_its_teacher(make_pupil, model_path, tmp_path, way):
    build_tiny_model(tmp_path / "teacher", num_layers=1, width=64, seed=3, spread=0.1)
    alone = [f"{DISTIL}use_task_rewards=false", "actor_rollout_ref.actor.optim.lr=3e-3"]
    worker, asked = make_pupil(tmp_path / "teacher", *WAYS[way], *alone)
    before = distance(worker)
    steps = train(worker, model_path, *asked, steps=16, is_policys=True)
    told = [step["actor/distillation/teacher_kl"] for step in steps]
    assert before > 0.3 and distance(worker) < 0.85 * before
    if way == "reward":  # at ratio 1 the loss is the mean of minus the advantages: the KL
        losses = [step["actor/distillation/loss"] for step in steps]
        assert losses == pytest.approx(told, abs=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_a_teacher_that_is_the_policy_says_nothing_at_first(make_pupil, model_path, way):
    worker, asked = make_pupil(model_path, *WAYS[way])  # beside the task's rewards, which move it
    first, second = train(worker, model_path, *asked)
    for name in ("teacher_kl", "loss", "abs_loss"):
        assert first[f"actor/distillation/{name}"] == pytest.approx(0, abs=1e-6)
    assert second["actor/distillation/abs_loss"] > 0 and second["actor/distillation/loss"] != 0
