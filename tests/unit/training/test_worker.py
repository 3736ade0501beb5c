"""The training worker: exactly once, non-finite steps, schedule, checkpoints, publication."""

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlcore.algorithms import ppo_loss
from rlcore.checkpoint_engine.segment import read_tensors
from rlcore.errors import CheckpointError, DataError, FencedError, NonFiniteLossError
from rlcore.training.schedule import LearningRate
from rlcore.training.worker import TrainingWorker


def weights(worker: TrainingWorker) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in worker.policy.model.parameters()])


def test_packed_padded_and_cut_updates_are_the_same(make_spec, make_key, make_rows):
    rows, groups = make_rows()
    results = []
    for changes in (
        {},
        {"packing": "padded"},
        {"micro_batch_rows": 2},
        {"micro_batch_tokens": 30},
        {"packing": "padded", "micro_batch_tokens": 30},
    ):
        # SGD-like comparison of gradients: one clipped AdamW step from equal weights
        worker = TrainingWorker(make_spec(**changes))
        metrics = worker.update_actor(make_key(1), rows, groups)
        results.append((metrics["actor/pg_loss"], metrics["actor/grad_norm"]))
        assert metrics["actor/optimizer_steps"] == 1
    for found in results[1:]:
        assert found == pytest.approx(results[0], rel=1e-4)


def test_the_loss_is_that_of_the_definition(make_spec, make_key, make_rows):
    rows, groups = make_rows()
    worker = TrainingWorker(make_spec(entropy_coeff=0.1))
    old, metrics = worker.compute_log_prob(make_key(1), rows)
    pad = torch.nn.utils.rnn.pad_sequence
    columns = {
        n: pad(v, batch_first=True) for n, v in {**rows, "logp": old["old_log_probs"]}.items()
    }
    mask = columns["response_mask"]
    expected = ppo_loss(
        columns["old_log_probs"], columns["logp"], columns["advantages"], mask, dual_clip=3.0
    )
    entropy = pad(old["entropy"], batch_first=True)[mask.bool()].mean().item()
    updated = worker.update_actor(make_key(1), rows, groups)
    assert updated["actor/pg_loss"] == pytest.approx(expected.item(), rel=1e-4)
    assert updated["actor/entropy_loss"] == pytest.approx(entropy, rel=1e-4)
    assert metrics["actor/entropy"] == pytest.approx(entropy, rel=1e-4)


def test_old_log_probs_of_the_engine_are_compared(make_spec, make_key, make_rows):
    rows, _ = make_rows()
    worker = TrainingWorker(make_spec())
    columns, _ = worker.compute_log_prob(make_key(1), rows)
    rows["rollout_log_probs"] = [value.clone() for value in columns["old_log_probs"]]
    _, metrics = worker.compute_log_prob(make_key(1), rows)
    assert metrics["rollout_corr/k3_kl"] == pytest.approx(0, abs=1e-9)
    rows["rollout_log_probs"] = [value - 0.5 for value in rows["rollout_log_probs"]]
    _, metrics = worker.compute_log_prob(make_key(1), rows)
    assert metrics["rollout_corr/kl"] == pytest.approx(-0.5, rel=1e-4)


def test_a_repeat_returns_the_stored_metrics(make_spec, make_key, make_rows):
    rows, groups = make_rows()
    worker = TrainingWorker(make_spec())
    first = worker.update_actor(make_key(1), rows, groups)
    after = weights(worker)
    again = worker.update_actor(make_key(1, try_number=2), rows, groups)
    assert again == first and torch.equal(weights(worker), after)
    assert worker.state()["applied"] == (1, 0) and worker.state()["inner_steps"] == 1


def test_an_interrupted_update_goes_on_where_it_stopped(make_spec, make_key, make_rows):
    rows, groups = make_rows()
    spec = make_spec(mini_batch_groups=1, ppo_epochs=2, shuffle=True)
    whole = TrainingWorker(spec)
    metrics = whole.update_actor(make_key(1), rows, groups)
    assert metrics["actor/optimizer_steps"] == 6

    class Interrupted(Exception):
        pass

    def interrupt(*args):
        if worker.progress.num_applied(make_key(1)) == 4:
            raise Interrupted
        return step(*args)

    worker = TrainingWorker(spec)
    step, worker.updater.step = worker.updater.step, interrupt  # type: ignore[method-assign]
    with pytest.raises(Interrupted):
        worker.update_actor(make_key(1), rows, groups)
    worker.updater.step = step  # type: ignore[method-assign]
    resumed = worker.update_actor(make_key(1, try_number=2), rows, groups)
    assert torch.equal(weights(worker), weights(whole))
    assert resumed["actor/pg_loss"] == metrics["actor/pg_loss"]


def test_older_callers_are_refused(make_spec, make_key, make_rows):
    rows, groups = make_rows()
    worker = TrainingWorker(make_spec())
    worker.update_actor(make_key(2, phase="update_actor", try_number=2), rows, groups)
    with pytest.raises(FencedError, match="try 2"):
        worker.update_actor(make_key(2, phase="update_actor"), rows, groups)
    with pytest.raises(FencedError, match=r"2\.0 has been applied"):
        worker.update_actor(make_key(1), rows, groups)
    with pytest.raises(FencedError, match="has begun"):
        worker.compute_log_prob(make_key(2), rows)


def test_groups_without_advantage_are_skipped_exactly(make_spec, make_key, make_rows):
    rows, groups = make_rows()
    rows["advantages"][:3] = [torch.zeros_like(value) for value in rows["advantages"][:3]]
    skipping = TrainingWorker(make_spec())
    metrics = skipping.update_actor(make_key(1), rows, groups)
    assert metrics["actor/trained_trajectories"] == 6
    # a tiny entropy bonus makes every row take part
    full = TrainingWorker(make_spec(entropy_coeff=1e-12))
    other = full.update_actor(make_key(1), rows, groups)
    assert other["actor/trained_trajectories"] == 9
    for name in ("actor/pg_loss", "actor/grad_norm"):
        assert metrics[name] == pytest.approx(other[name], rel=1e-4)


def test_no_advantage_at_all_still_decays_the_moments(make_spec, make_key, make_rows):
    rows, groups = make_rows()
    worker = TrainingWorker(make_spec())
    worker.update_actor(make_key(1), rows, groups)
    before = weights(worker)
    rows["advantages"] = [torch.zeros_like(value) for value in rows["advantages"]]
    metrics = worker.update_actor(make_key(2), rows, groups)
    assert metrics["actor/grad_norm"] == 0 and metrics["actor/pg_loss"] == 0
    assert not torch.equal(weights(worker), before)


def test_non_finite_steps_are_skipped_dumped_and_at_last_fatal(
    make_spec, make_key, make_rows, tmp_path
):
    rows, groups = make_rows()
    worker = TrainingWorker(make_spec(max_nonfinite_steps=2, mini_batch_groups=1))
    before = weights(worker)
    rows["advantages"][4][0] = float("nan")
    metrics = worker.update_actor(make_key(1), rows, groups)
    assert (metrics["actor/optimizer_steps"], metrics["actor/nonfinite_steps"]) == (2, 1)
    assert math.isfinite(metrics["actor/pg_loss"])
    dump = torch.load(tmp_path / "run/nonfinite/step-0001.0-optimizer-1.pt", weights_only=True)
    assert dump["groups"] == ["prompt1"]
    assert dump["prompts"][0].tolist() == rows["prompts"][4].tolist()
    assert not torch.equal(weights(worker), before) and weights(worker).isfinite().all()
    rows["advantages"] = [torch.full_like(value, float("nan")) for value in rows["advantages"]]
    before = weights(worker)
    with pytest.raises(NonFiniteLossError, match=r"prompt1.*number 2 in a row"):
        worker.update_actor(make_key(2), rows, groups)
    assert torch.equal(weights(worker), before)


def test_the_learning_rate_moves_once_per_inner_step(make_spec, make_key, make_rows):
    rows, groups = make_rows()
    worker = TrainingWorker(
        make_spec(learning_rate=LearningRate(peak=1e-2, warmup_steps=4), mini_batch_groups=1)
    )
    rates = [worker.update_actor(make_key(step), rows, groups)["actor/lr"] for step in range(1, 7)]
    assert rates == pytest.approx([0, 2.5e-3, 5e-3, 7.5e-3, 1e-2, 1e-2])


def test_a_resumed_worker_ends_with_the_same_bits(make_spec, make_key, make_rows, tmp_path):
    rows, groups = make_rows()
    worker = TrainingWorker(make_spec())
    worker.update_actor(make_key(1), rows, groups)
    worker.save_checkpoint(make_key(1), tmp_path / "actor")
    saved = worker.publish_weights(make_key(1), tmp_path, "float32")
    last = worker.update_actor(make_key(2), rows, groups)
    later = worker.publish_weights(make_key(2), tmp_path, "float32")
    resumed = TrainingWorker(make_spec(seed=9))
    resumed.load_checkpoint(make_key(1), tmp_path / "actor")
    # the same state keeps its version; what comes after never gets one that was given out
    again = resumed.publish_weights(make_key(1), tmp_path, "float32")
    assert (again.version, again.checksum) == (saved.version, saved.checksum)
    metrics = resumed.update_actor(make_key(2), rows, groups)
    assert torch.equal(weights(resumed), weights(worker))
    timing = "perf/update_seconds"
    assert {**metrics, timing: 0} == {**last, timing: 0}
    assert resumed.publish_weights(make_key(2), tmp_path, "float32").version == later.version + 1
    assert resumed.update_actor(make_key(1, try_number=2), rows, groups)["actor/lr"] == 1e-3


def test_versions_name_states(make_spec, make_key, make_rows, tmp_path):
    rows, groups = make_rows()
    worker = TrainingWorker(make_spec())
    first = worker.publish_weights(make_key(0), tmp_path, "bfloat16")
    assert (first.version, worker.publish_weights(make_key(0), tmp_path, "bfloat16")) == (0, first)
    worker.update_actor(make_key(1), rows, groups)
    second = worker.publish_weights(make_key(1), tmp_path, "bfloat16")
    assert second.version == 1 and second.checksum != first.checksum
    names = dict(worker.policy.model.named_parameters(remove_duplicate=False))
    for name, tensor in read_tensors(second):
        assert torch.equal(tensor, names[name].detach().bfloat16())


def test_broken_checkpoints_are_refused(make_spec, make_key, tmp_path):
    worker = TrainingWorker(make_spec())
    folder = tmp_path / "actor"
    with pytest.raises(CheckpointError, match="cannot be read"):
        worker.load_checkpoint(make_key(1), folder)
    worker.save_checkpoint(make_key(1), folder)
    counters = json.loads((folder / "counters.json").read_text())
    (folder / "counters.json").write_text(json.dumps({**counters, "format_version": 99}))
    with pytest.raises(CheckpointError, match="format 99"):
        worker.load_checkpoint(make_key(1), folder)
    (folder / "counters.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        worker.load_checkpoint(make_key(1), folder)
    (folder / "counters.json").write_text(json.dumps(counters))
    with (folder / "state/rank-0.bin").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(CheckpointError, match=r"cannot be read: rank-0.bin ends after 1000 bytes"):
        worker.load_checkpoint(make_key(1), folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        worker.save_checkpoint(make_key(1), tmp_path / "file" / "actor")
    with pytest.raises(CheckpointError, match="cannot be written"):
        worker.export_hf(make_key(1), tmp_path / "file" / "model")


def test_the_export_is_an_ordinary_model_folder(make_spec, make_key, make_rows, tmp_path):
    rows, groups = make_rows()
    worker = TrainingWorker(make_spec())
    worker.update_actor(make_key(1), rows, groups)
    worker.export_hf(make_key(1), tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    ids = torch.arange(4, 20)[None]
    layout = worker.policy.layout([ids[0, :8]], [ids[0, 8:]])
    logp = worker.policy.log_probs(layout, 1.0)[0]
    want = torch.log_softmax(model(ids).logits[0, 7:-1], -1).gather(-1, ids[0, 8:, None])[:, 0]
    assert torch.allclose(logp, want, atol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.chat_template and tokenizer.decode(tokenizer.encode("hi")) == "hi"


def test_malformed_columns_are_named(make_spec, make_key, make_rows):
    rows, groups = make_rows()
    worker = TrainingWorker(make_spec())
    with pytest.raises(DataError, match="columns advantages are missing"):
        worker.update_actor(
            make_key(1), {n: v for n, v in rows.items() if n != "advantages"}, groups
        )
    short = {**rows, "advantages": rows["advantages"][:-1]}
    with pytest.raises(DataError, match="column advantages has 8 rows, not 9"):
        worker.update_actor(make_key(1), short, groups)
    ragged = {**rows, "response_mask": [torch.ones(99).long(), *rows["response_mask"][1:]]}
    with pytest.raises(DataError, match="row 0: response_mask has 99 entries"):
        worker.compute_log_prob(make_key(1), ragged)
    bare = {**rows, "prompts": [torch.empty(0).long(), *rows["prompts"][1:]]}
    with pytest.raises(DataError, match=r"rows \[0\] have no prompt token"):
        worker.compute_log_prob(make_key(1), bare)
