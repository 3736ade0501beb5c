"""What `rollflow check` tells: the resolved configuration and what follows from it."""

import math
from typing import Any

from pydantic_core import to_jsonable_python

from rlcore.config.cores import core_shares
from rlcore.config.memory import memory_parts, micro_batch_tokens
from rlcore.config.model_shape import read_model_shape
from rlcore.config.problems import show
from rlcore.config.queue_size import queue_capacity, row_bytes
from rlcore.config.rules_async import num_warmup_batches, rows_in_flight
from rlcore.config.rules_devices import pools
from rlcore.config.run import RunConfig
from rlcore.config.tree import Tree, get, honoured_fields

_MIB = 1024**2


def settings(config: RunConfig, *, show_all: bool = False) -> dict[str, Any]:
    """Return dotted keys and values: those that differ from the defaults, or all.

    Keys without a default always differ; keys that are not read are left out.
    """
    tree: Tree = config.model_dump(mode="json")
    return {
        path: get(tree, path)
        for path, field in honoured_fields().items()
        if show_all
        or field.is_required()
        or get(tree, path) != to_jsonable_python(field.get_default(call_default_factory=True))
    }


def plan(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Return what a run of `config` uses and does, as sections of named values."""
    return {
        "devices": _devices(config),
        "step": _step(config),
        "memory": _memory(config),
        "run": _run(config),
        "staleness": _staleness(config),
        "buffer": _buffer(config),
    }


def _devices(config: RunConfig) -> dict[str, Any]:
    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
    return {
        "device": trainer.device,
        "training_ranks": config.num_ranks,
        "replicas": rollout.num_replicas,
        "slots_per_replica": rollout.max_num_seqs,
        "agent_loop_workers": rollout.agent.num_workers,
        "pools": ", ".join(
            f"{name}: {hosts} x {devices}" for name, (hosts, devices) in pools(config).items()
        ),
        "threads_per_process": config.ray.num_threads or "all cores",
        **_cores(config),
        "ray": config.ray.address or f"local cluster with {config.ray.num_cpus} logical CPUs",
    }


def _cores(config: RunConfig) -> dict[str, str]:
    is_separate = config.trainer.v1.trainer_mode == "separate_async"
    shares = core_shares(config, is_separate=is_separate)
    told = (f"{name}: {', '.join(map(str, own))}" for name, own in shares.items())
    return {"cores": "; ".join(told)} if shares else {}


def _step(config: RunConfig) -> dict[str, Any]:
    rollout = config.actor_rollout_ref.rollout
    slots = rollout.max_num_seqs * rollout.num_replicas
    return {
        "prompts": config.data.train_batch_size,
        "trajectories": config.num_trajectories,
        "tokens_at_most": config.num_trajectories * config.max_model_len,
        "rounds_of_slots": math.ceil(config.num_trajectories / slots),
        "optimizer_steps": config.num_optimizer_steps,
        "micro_batches": _micro_batches(config),
        "tokens_per_micro_batch_at_most": micro_batch_tokens(config),
    }


def _memory(config: RunConfig) -> dict[str, Any]:
    """Sizes in MiB; nothing but a reason where the model folder does not tell its sizes."""
    folder = config.actor_rollout_ref.model.path
    shape = read_model_shape(folder)
    if shape is None:
        return {"unknown": f"{folder} has no config.json with safetensors beside it"}
    path = config.teacher_path
    parts = memory_parts(config, shape, None if path is None else read_model_shape(path))
    mebibytes = {f"{name}_mib": math.ceil(size / _MIB) for name, size in parts.items()}
    return {
        "parameters": shape.num_parameters,
        **mebibytes,
        "sum_mib": math.ceil(sum(parts.values()) / _MIB),
    }


def _run(config: RunConfig) -> dict[str, Any]:
    trainer = config.trainer
    return {
        "steps": trainer.total_training_steps or f"{trainer.total_epochs} epochs",
        "validation": _every(trainer.test_freq),
        "checkpoints": _every(trainer.save_freq),
        "folder": str(config.run_folder("<run id>")),
    }


def _staleness(config: RunConfig) -> dict[str, Any]:
    v1 = config.trainer.v1
    if v1.trainer_mode == "sync":
        why = "sync mode: the weights that sampled a batch are the ones it trains"
        return {"budget": 0, "warm_up_batches": 0, "why": why}
    limit = v1.sampler.max_off_policy_threshold
    return {
        "budget": "none" if limit is None else limit - 1,
        "warm_up_batches": num_warmup_batches(config),
        "why": f"max_off_policy_threshold, strategy {v1.sampler.max_off_policy_strategy}",
    }


def _buffer(config: RunConfig) -> dict[str, Any]:
    rows = rows_in_flight(config)
    capacity = queue_capacity(config)
    return {
        "training_rows_at_most": rows,
        "bytes_at_most": rows * row_bytes(config),
        "capacity_rows": "no limit" if capacity is None else capacity,
    }


def _micro_batches(config: RunConfig) -> str:
    actor = config.actor_rollout_ref.actor
    rows = actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n
    if actor.use_dynamic_bsz:
        return f"at most {actor.ppo_max_token_len_per_gpu} tokens each, {rows} trajectories a step"
    micro = actor.ppo_micro_batch_size_per_gpu or rows
    return f"{rows // micro} of {micro} trajectories per optimizer step"


def _every(steps: int) -> str:
    return "never" if steps < 1 else "every step" if steps == 1 else f"every {steps} steps"


def as_text(config: RunConfig, notices: list[str], source: str, *, show_all: bool = False) -> str:
    """Return the report for a person."""
    title = "all keys" if show_all else "keys that differ from the defaults"
    lines = [f"{source}: can be run", "", f"{title}:"]
    lines += [f"  {path} = {show(value)}" for path, value in settings(
        config, show_all=show_all
    ).items()]  # fmt: skip
    for section, values in plan(config).items():
        lines += ["", f"{section}:"]
        lines += [f"  {_label(name)}: {value}" for name, value in values.items()]
    if notices:
        lines += ["", "satisfied anyway, or without effect:"]
        lines += [f"  {notice}" for notice in notices]
    return "\n".join(lines)


def _label(name: str) -> str:
    return name.replace("_mib", " (MiB)").replace("_", " ")


def as_json(config: RunConfig, notices: list[str], source: str) -> dict[str, Any]:
    """Return the report for programs: config (whole), changed, plan, notices, source."""
    return {
        "ok": True,
        "source": source,
        "config": config.model_dump(mode="json"),
        "changed": settings(config),
        "plan": plan(config),
        "notices": notices,
        "problems": [],
    }
