"""`make gpu-smoke`: what needs a GPU, on one, in at most 8 minutes. Prints each thing it checked.

    python tests/gpu/smoke.py [--only colocated|sync|colocate_async|separate_async]

Needs the package vllm in this environment and what `make model` prepares. Two kinds of parts, each
in a process of its own, so that it leaves nothing on the GPU:

colocated       vLLM and trainer on the same GPU, by the plain objects that the actors wrap: sleep
                frees the engine's memory and wake gets it again, weights are published to the
                engine by every backend that can reach it, three GRPO steps.
one per mode    three GRPO steps of `rollflow train` with vLLM on the GPU and the trainer where the
                configuration allows it: on the CPU (`trainer.device=cuda` is refused so far).
"""

import argparse
import functools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch

from rlcore.algorithms import grpo
from rlcore.checkpoint_engine.base import TransferSettings
from rlcore.checkpoint_engine.manager import CheckpointEngineManager
from rlcore.config.names import kind_of
from rlcore.errors import WeightSyncError
from rlcore.rollout.engine import Engine, EngineRequest, EngineSpec, VllmSpec, build_engine
from rlcore.rollout.sampling_params import SamplingParams
from rlcore.testing.replicas import FakeReplica
from rlcore.tracking.curves import read_metrics
from rlcore.training.ranks import Ranks
from rlcore.training.schedule import LearningRate
from rlcore.training.spec import TrainingSpec
from rlcore.training.worker import TrainingWorker
from rlcore.types import CallKey, TokenOutput, WeightMeta

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "smollm2-135m-instruct"
LIMIT_S = 480.0
STEPS, SESSIONS, NEW_TOKENS = 3, 8, 16
FREED = 0.7
"""Share of the memory that the engine took which its sleep has to give back."""
GAP = 0.1
"""Nats per token that engine and trainer may be apart on average, in bfloat16."""
QUESTIONS = ("What is 3 + 4?", "What is 12 + 30?", "Count from 1 to 5.", "Name a colour.")
MODES = kind_of("trainer.v1.trainer_mode").works
A = "actor_rollout_ref."


class Checks:
    """What was checked, printed as it is."""

    def __init__(self) -> None:
        self.num_held = 0
        self.failed: list[str] = []

    def hold(self, what: str, holds: object, found: str) -> None:
        """Note a check; a failed one does not end the part."""
        print(f"{'ok    ' if holds else 'FAILED'} {what}: {found}", flush=True)
        if holds:
            self.num_held += 1
        else:
            self.failed.append(what)


def refusal() -> str | None:
    """Return why nothing can be checked here; None: it can."""
    if not torch.cuda.is_available():
        return "torch finds no GPU here"
    if find_spec("vllm") is None:
        return "vLLM is not installed here (pip install 'rollflow[vllm]')"
    if not MODEL.is_dir():
        return f"{MODEL} is missing (make model)"
    return None


# One GPU for both


class EngineReplica(FakeReplica):
    """An engine of this process where the manager expects a replica."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine

    def load_weights(self, key: CallKey, meta: WeightMeta) -> dict[str, object]:
        found = self.engine.stage_weights(meta)
        return {"version": meta.version, "num_bytes": meta.num_bytes, "checksum": found}

    def commit_weights(self, key: CallKey, version: int) -> None:
        super().commit_weights(key, version)
        self.engine.commit_weights(version)


class Source:
    """The worker where the manager expects the training group."""

    def __init__(self, worker: TrainingWorker, directory: str, dtype: str) -> None:
        self.worker, self.directory, self.dtype = worker, directory, dtype

    def publish_weights(self, key: CallKey) -> WeightMeta:
        meta = self.worker.publish_weights(key, self.directory, self.dtype)
        assert meta is not None
        return meta

    def published_weights(self) -> WeightMeta | None:
        return self.worker.published


def key_of(step: int, phase: str) -> CallKey:
    return CallKey(run_id="gpu-smoke", attempt=1, global_step=step, phase=phase)


def generate(
    engine: Engine, prompts: Sequence[list[int]], seed: int, *, do_sample: bool = True
) -> list[TokenOutput]:
    """Return a response to each prompt, in their order."""
    for index, prompt in enumerate(prompts):
        params = SamplingParams(
            max_tokens=NEW_TOKENS, seed=1000 * seed + index, do_sample=do_sample
        )
        engine.add(EngineRequest(request_id=str(index), prompt_ids=prompt, params=params))
    found: dict[str, TokenOutput] = {}
    ends = time.monotonic() + 120
    while len(found) < len(prompts):
        if time.monotonic() > ends:
            raise TimeoutError(f"{len(prompts) - len(found)} responses are not there after 120 s")
        found.update(engine.step())
    return [found[str(index)] for index in range(len(prompts))]


def rows_of(
    prompts: Sequence[list[int]], outputs: Sequence[TokenOutput], scores: Sequence[float],
    groups: Sequence[str],
) -> dict[str, list[torch.Tensor]]:  # fmt: skip
    """Return the batch as the worker takes it, without its own log-probs."""
    lengths = torch.tensor([len(output.token_ids) for output in outputs])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    advantages = grpo(torch.tensor(scores), list(groups), mask)
    return {
        "prompts": [torch.tensor(prompt) for prompt in prompts],
        "responses": [torch.tensor(output.token_ids) for output in outputs],
        "response_mask": [torch.ones(int(n), dtype=torch.long) for n in lengths],
        "rollout_log_probs": [torch.tensor(output.log_probs) for output in outputs],
        "advantages": [row[: int(n)] for row, n in zip(advantages, lengths, strict=True)],
    }


def grpo_step(
    checks: Checks, engine: Engine, worker: TrainingWorker, manager: CheckpointEngineManager,
    questions: Sequence[list[int]], step: int,
) -> None:  # fmt: skip
    """One step in turns on one device: generate, sleep, train, publish, wake."""
    prompts = [prompt for prompt in questions for _ in range(SESSIONS)]
    groups = [str(index) for index in range(len(questions)) for _ in range(SESSIONS)]
    outputs = generate(engine, prompts, step)
    versions = {version for output in outputs for version in output.weight_versions}
    checks.hold(f"step {step}: tokens name the weights", versions == {step - 1}, str(versions))
    engine.release_cache()
    # Differs within a group whatever the model says: the share of even tokens.
    scores = [sum(t % 2 == 0 for t in o.token_ids) / len(o.token_ids) for o in outputs]
    rows = rows_of(prompts, outputs, scores, groups)
    columns, compared = worker.compute_log_prob(key_of(step, "compute_old_log_probs"), rows)
    gap = compared["training/rollout_logp_diff_mean"]
    checks.hold(f"step {step}: engine and trainer agree", gap <= GAP, f"{gap:.2g} nats on average")
    metrics = worker.update_actor(key_of(step, "update_actor"), rows | columns, groups)
    norm = metrics["actor/grad_norm"]
    checks.hold(f"step {step}: the policy moves", norm > 0, f"gradient norm {norm:.3g}")
    result = manager.with_key(key_of(step, "update_weights")).update_weights(step)
    checks.hold(
        f"step {step}: new weights are served", engine.weight_version == result["version"] == step,
        f"version {result['version']}, {result['bytes'] / 1e6:.0f} MB in {result['seconds']:.2f} s",
    )  # fmt: skip
    engine.restore_cache()


def check_sleep(checks: Checks, engine: Engine, took: int, prompt: list[int]) -> None:
    """The engine's memory is free while it sleeps, and it says the same afterwards."""

    def free() -> int:
        return torch.cuda.mem_get_info()[0]

    (before,) = generate(engine, [prompt], 0, do_sample=False)
    awake = free()
    engine.release_cache()
    freed = (free() - awake) / took
    checks.hold("sleep frees the engine's memory", freed >= FREED, f"{freed:.0%} of {took} bytes")
    engine.restore_cache()
    back = (free() - awake) / took
    checks.hold("wake takes it again", abs(back) < 1 - FREED, f"{back:.0%} is still free")
    (after,) = generate(engine, [prompt], 0, do_sample=False)
    checks.hold("it says the same", before.token_ids == after.token_ids, str(after.token_ids[:6]))


def check_backends(
    checks: Checks, source: Source, engine: Engine, names: Sequence[str]
) -> CheckpointEngineManager:
    """Publish by each backend; return the last one's manager. All name the same version."""
    manager = None
    for name in names:
        replica, settings = {"engine": EngineReplica(engine)}, TransferSettings()
        manager = CheckpointEngineManager(
            source, replica, backend=name, settings=settings, key=key_of(0, f"by {name}")
        )
        result = manager.update_weights(0)
        checks.hold(
            f"publication by {name}", result["replicas"] == 1,
            f"{result['bytes'] / 1e6:.0f} MB in {result['seconds']:.2f} s",
        )  # fmt: skip
    assert manager is not None
    return manager


def check_nccl_refuses(checks: Checks, source: Source, engine: Engine) -> None:
    """One GPU is not enough for nccl, and it says so."""
    replica = {"engine": EngineReplica(engine)}
    manager = CheckpointEngineManager(source, replica, backend="nccl", key=key_of(0, "by nccl"))
    try:
        manager.update_weights(0)
    except WeightSyncError as error:
        checks.hold("nccl refuses one device", "joins no device with itself" in str(error), "yes")
    else:
        checks.hold("nccl refuses one device", False, "it did not")


def colocated(checks: Checks) -> None:
    """vLLM and trainer on one GPU."""
    from transformers import AutoTokenizer

    torch.cuda.init()
    before = torch.cuda.mem_get_info()[0]
    spec = EngineSpec(
        name="vllm", model_path=str(MODEL), dtype="bfloat16", max_num_seqs=64, max_model_len=256,
        num_threads=None, vllm=VllmSpec(memory_share=0.3, enforce_eager=True),
    )  # fmt: skip
    engine = build_engine(spec)
    took = before - torch.cuda.mem_get_info()[0]
    checks.hold("vLLM is on the GPU", took > 1 << 30, f"{took} bytes taken")
    tokenizer = AutoTokenizer.from_pretrained(str(MODEL))
    questions = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in QUESTIONS
    ]
    check_sleep(checks, engine, took, questions[0])
    with tempfile.TemporaryDirectory(prefix="rollflow-smoke-") as folder:
        training = TrainingSpec(
            run_id="gpu-smoke", attempt=1, folder=folder, model_path=str(MODEL), device="cuda",
            learning_rate=LearningRate(peak=2e-5), mini_batch_groups=len(questions),
        )  # fmt: skip
        worker = TrainingWorker(training, Ranks(device="cuda"))
        place = next(worker.policy.model.parameters()).device
        checks.hold("the trainer is on the GPU", place.type == "cuda", str(place))
        source = Source(worker, "/dev/shm", "bfloat16")
        names = ["shm", "gloo", *(["kimi_ckpt_engine"] if find_spec("checkpoint_engine") else [])]
        try:
            check_nccl_refuses(checks, source, engine)
            manager = check_backends(checks, source, engine, [*names, "naive"])
            for step in range(1, STEPS + 1):
                grpo_step(checks, engine, worker, manager, questions, step)
        finally:
            if worker.published is not None:
                Path(worker.published.path).unlink()
    engine.close()


# Whole runs


def train_command(mode: str, folder: Path) -> list[str]:
    """Return the command of three steps in a mode."""
    separate = (
        f"{A}rollout.checkpoint_engine.backend=shm",
        "trainer.v1.separate_async.parameter_sync_step=1",
    )
    more = separate if mode == "separate_async" else ()
    return [
        str(Path(sys.executable).with_name("rollflow")), "train", "grpo-smollm2",
        f"trainer.v1.trainer_mode={mode}", f"{A}rollout.name=vllm",
        f"trainer.total_training_steps={STEPS}", "trainer.val_before_train=false",
        "trainer.test_freq=-1", "trainer.save_freq=-1", f"trainer.runs_root={folder}",
        f"trainer.default_local_dir={folder / mode}", *more,
    ]  # fmt: skip


def whole_run(checks: Checks, mode: str) -> None:
    """Three steps by the command; its console is shown if it fails."""
    with tempfile.TemporaryDirectory(prefix="rollflow-smoke-") as name:
        folder, lowest = Path(name), torch.cuda.mem_get_info()[0]
        start = lowest
        with (folder / "console").open("w+") as console:
            command = train_command(mode, folder)
            process = subprocess.Popen(command, cwd=ROOT, stdout=console, stderr=subprocess.STDOUT)
            while process.poll() is None:
                lowest = min(lowest, torch.cuda.mem_get_info()[0])
                time.sleep(0.5)
        if process.returncode:
            print((folder / "console").read_text()[-4000:])
        checks.hold(f"{mode}: the run ends well", process.returncode == 0, f"{process.returncode}")
        if process.returncode == 0:
            checks.hold(f"{mode}: vLLM was on the GPU", start - lowest > 1 << 30,
                        f"{start - lowest} bytes at most")  # fmt: skip
            check_metrics(checks, mode, folder / mode / "metrics.jsonl")


def check_metrics(checks: Checks, mode: str, path: Path) -> None:
    """What a run says of its steps."""
    by_step = read_metrics(path)
    norms = [by_step.get(step, {}).get("actor/grad_norm", 0.0) for step in range(1, STEPS + 1)]
    checks.hold(f"{mode}: every step moved the policy", all(norm > 0 for norm in norms), f"{norms}")
    version = by_step.get(STEPS, {}).get("checkpoint_engine/version")
    checks.hold(f"{mode}: the last weights are served", version == STEPS, f"version {version}")


# All of it


RUNS = {mode: functools.partial(whole_run, mode=mode) for mode in MODES}
PARTS = {"colocated": colocated, **RUNS}


def run_parts(names: Sequence[str], limit_s: float) -> int:
    """Run each part in a process of its own within the limit of all; return the exit code."""
    ends, failed = time.monotonic() + limit_s, []
    for name in names:
        print(f"== {name}", flush=True)
        command = [sys.executable, __file__, "--part", name]
        # A session of its own, so that what is overdue ends with all that it started.
        process = subprocess.Popen(command, start_new_session=True)
        try:
            code = process.wait(max(1.0, ends - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            print(f"FAILED {name}: not over after {limit_s:g} s in all", flush=True)
            code = 1
        if code:
            failed.append(name)
    print(f"gpu-smoke: {len(names) - len(failed)} of {len(names)} parts held"
          + (f", not {', '.join(failed)}" if failed else ""))  # fmt: skip
    return 1 if failed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Check everything, or a part; return the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=list(PARTS))
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    reason = refusal()
    if reason is not None:
        print(f"gpu-smoke: nothing was checked: {reason}")
        return 1
    if options.part is None:
        return run_parts([options.only] if options.only else list(PARTS), LIMIT_S)
    checks = Checks()
    PARTS[options.part](checks)
    print(f"{options.part}: {checks.num_held} checks held, {len(checks.failed)} failed")
    return 1 if checks.failed else 0


if __name__ == "__main__":
    sys.exit(main())
