"""Rules about sampling, the engine, agent loops, rewards and validation."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Final

from rlcore.config.problems import Problem
from rlcore.config.run import RunConfig

_ROLLOUT: Final = "actor_rollout_ref.rollout."
_VAL: Final = f"{_ROLLOUT}val_kwargs"
_ENGINE: Final = f"{_ROLLOUT}checkpoint_engine."
_BACKEND_SETTINGS: Final = {
    "gloo": ("host",),
    "kimi_ckpt_engine": ("mem_fraction",),
    "mooncake": ("host", "protocol", "device"),
    "naive": (),
    "nccl": ("host", "device"),
    "shm": (),
}
_VLLM_HOTTEST: Final = 2.0
_ONE_PROCESS: Final = frozenset({"gloo", "kimi_ckpt_engine", "mooncake", "nccl"})


def validation_sampling_fits(config: RunConfig) -> Iterator[Problem]:
    """`val_kwargs.do_sample`, `temperature` and `n` ask for the same thing."""
    val = config.actor_rollout_ref.rollout.val_kwargs
    if val.do_sample and val.temperature == 0:
        yield Problem(
            path=f"{_VAL}.temperature",
            value=val.temperature,
            reason=f"{_VAL}.do_sample=true needs a temperature above 0",
            fix="set it to 1.0, or do_sample=false",
            involves=(f"{_VAL}.do_sample",),
        )
    if not val.do_sample and val.temperature > 0:
        yield Problem(
            path=f"{_VAL}.temperature",
            value=val.temperature,
            reason=f"it has no effect with {_VAL}.do_sample=false",
            fix="leave it out, or set do_sample=true",
            involves=(f"{_VAL}.do_sample",),
        )
    if not val.do_sample and val.n > 1:
        yield Problem(
            path=f"{_VAL}.n",
            value=val.n,
            reason=f"{_VAL}.do_sample=false gives {val.n} times the same response",
            fix="set it to 1, or do_sample=true with a temperature",
            involves=(f"{_VAL}.do_sample",),
        )


def engine_reads_whole_trajectories(config: RunConfig) -> Iterator[Problem]:
    """`rollout.max_model_len` holds a prompt and its response."""
    limit, needed = config.actor_rollout_ref.rollout.max_model_len, config.max_model_len
    if limit is not None and limit < needed:
        yield Problem(
            path=f"{_ROLLOUT}max_model_len",
            value=limit,
            reason=(
                f"a trajectory does not fit: data.max_prompt_length {config.data.max_prompt_length}"
                f" + max_response_length {config.data.max_response_length} = {needed} tokens"
            ),
            fix="leave it out",
            involves=("data.max_prompt_length", "data.max_response_length"),
        )


def settings_belong_to_the_weight_backend(config: RunConfig) -> Iterator[Problem]:
    """`checkpoint_engine.engine_kwargs` holds settings of the chosen backend, which it has."""
    engine, path = config.actor_rollout_ref.rollout.checkpoint_engine, f"{_ENGINE}engine_kwargs"
    involves = (f"{_ENGINE}backend",)
    for backend, settings in engine.engine_kwargs.items():
        if backend != engine.backend:
            yield Problem(
                path=f"{path}.{backend}",
                value=settings,
                reason=f"it has no effect with {_ENGINE}backend={engine.backend}",
                fix=f"leave it out, or set {_ENGINE}backend={backend}",
                involves=involves,
            )
            continue
        known = _BACKEND_SETTINGS.get(backend, tuple(settings))  # one of the user's knows its own
        for name in sorted(set(settings) - set(known)):
            yield Problem(
                path=f"{path}.{backend}.{name}",
                value=settings[name],
                reason=f"{_ENGINE}backend={backend} has no such setting",
                fix=f"choose from {', '.join(known)}" if known else "leave it out: it has none",
                involves=involves,
            )


def expert_parallel_is_the_product(config: RunConfig) -> Iterator[Problem]:
    """Experts are shared by all devices of an engine, or by none (verl's rule)."""
    rollout = config.actor_rollout_ref.rollout
    product = rollout.tensor_model_parallel_size * rollout.data_parallel_size
    if rollout.expert_parallel_size not in {1, product}:
        yield Problem(
            path=f"{_ROLLOUT}expert_parallel_size",
            value=rollout.expert_parallel_size,
            reason=(
                f"it must be 1 or tensor_model_parallel_size {rollout.tensor_model_parallel_size}"
                f" x data_parallel_size {rollout.data_parallel_size} = {product}"
            ),
            fix=f"set it to {product}",
            involves=(f"{_ROLLOUT}tensor_model_parallel_size", f"{_ROLLOUT}data_parallel_size"),
        )


def vllm_is_there(config: RunConfig) -> Iterator[Problem]:
    """The engine vllm can be imported."""
    if config.actor_rollout_ref.rollout.name == "vllm" and find_spec("vllm") is None:
        yield Problem(
            path=f"{_ROLLOUT}name",
            value="vllm",
            reason="vLLM is not installed here",
            fix="`make setup-vllm` and use .venv-vllm/bin/rollflow, or set it to transformers, "
            "which runs on any CPU",
            is_unsupported=True,
        )


def vllm_can_do_it(config: RunConfig) -> Iterator[Problem]:
    """What the engine vllm cannot do is not asked of it."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.name != "vllm":
        return
    if rollout.full_determinism:
        yield Problem(
            path=f"{_ROLLOUT}full_determinism",
            value=True,
            reason=f"responses of {_ROLLOUT}name=vllm depend in the last bits on others",
            fix=f"leave it out, or set {_ROLLOUT}name=transformers",
            involves=(f"{_ROLLOUT}name",),
        )
    if not config.actor_rollout_ref.model.lora.merge:
        yield Problem(
            path="actor_rollout_ref.model.lora.merge",
            value=False,
            reason=f"{_ROLLOUT}name=vllm takes whole weights",
            fix=f"leave it out, or set {_ROLLOUT}name=transformers",
            involves=(f"{_ROLLOUT}name",),
        )
    for key, value in (
        (f"{_ROLLOUT}temperature", rollout.temperature),
        (f"{_VAL}.temperature", rollout.val_kwargs.temperature),
    ):
        if value > _VLLM_HOTTEST:
            yield Problem(
                path=key,
                value=value,
                reason=f"{_ROLLOUT}name=vllm samples at temperatures up to {_VLLM_HOTTEST:g}",
                fix=f"set it to {_VLLM_HOTTEST:g} at most",
                involves=(f"{_ROLLOUT}name",),
            )
    processes = rollout.tensor_model_parallel_size * rollout.data_parallel_size
    backend = rollout.checkpoint_engine.backend
    if processes > 1 and backend in _ONE_PROCESS:
        yield Problem(
            path=f"{_ENGINE}backend",
            value=backend,
            reason=(
                f"it sends to one process of a replica, which has tensor_model_parallel_size "
                f"{rollout.tensor_model_parallel_size} x data_parallel_size "
                f"{rollout.data_parallel_size} = {processes}"
            ),
            fix="set it to shm, from which each process reads by itself",
            involves=(f"{_ROLLOUT}tensor_model_parallel_size", f"{_ROLLOUT}data_parallel_size"),
        )


def overlong_buffer_fits(config: RunConfig) -> Iterator[Problem]:
    """DAPO's buffer lies within the response."""
    kwargs = config.reward.reward_kwargs
    buffer, path = kwargs.overlong_buffer_cfg, "reward.reward_kwargs.overlong_buffer_cfg"
    limit = kwargs.max_resp_len or config.data.max_response_length
    if buffer.enable and not 0 < buffer.len <= limit:
        yield Problem(
            path=f"{path}.len",
            value=buffer.len,
            reason=(
                f"{path}.enable=true needs a buffer within the longest response: 0 < len <= {limit}"
            ),
            fix=f"set it to at most {limit}",
            involves=(
                f"{path}.enable",
                "reward.reward_kwargs.max_resp_len",
                "data.max_response_length",
            ),
        )


def reward_manager_has_a_place(config: RunConfig) -> Iterator[Problem]:
    """A manager from a module has a path."""
    manager = config.reward.reward_manager
    if manager.source == "importlib" and manager.module.path is None:
        yield Problem(
            path="reward.reward_manager.module.path",
            value=None,
            reason="reward.reward_manager.source=importlib needs it",
            fix="set it to a Python file, or source=register",
            involves=("reward.reward_manager.source",),
        )


def reward_model_is_named(config: RunConfig) -> Iterator[Problem]:
    """A reward model has a folder, and its own pool has devices."""
    model, path = config.reward.reward_model, "reward.reward_model"
    if not model.enable:
        return
    if model.model_path is None:
        yield Problem(
            path=f"{path}.model_path",
            value=None,
            reason=f"{path}.enable=true needs it",
            fix="set it to a folder in Hugging Face format",
            involves=(f"{path}.enable",),
        )
    if model.enable_resource_pool and model.nnodes * model.n_gpus_per_node == 0:
        yield Problem(
            path=f"{path}.nnodes",
            value=model.nnodes,
            reason=(
                f"{path}.enable_resource_pool=true needs devices: nnodes {model.nnodes} x "
                f"n_gpus_per_node {model.n_gpus_per_node} = 0"
            ),
            fix="set both above 0",
            involves=(f"{path}.enable_resource_pool", f"{path}.n_gpus_per_node"),
        )


RULES = (
    validation_sampling_fits,
    engine_reads_whole_trajectories,
    settings_belong_to_the_weight_backend,
    expert_parallel_is_the_product,
    vllm_is_there,
    vllm_can_do_it,
    overlong_buffer_fits,
    reward_manager_has_a_place,
    reward_model_is_named,
)
