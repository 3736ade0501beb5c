"""The contract of a rollout engine: what an LLMServer drives from its thread.

An engine is synchronous and used from one thread. It samples tokens for the requests it was given,
one `step` at a time, and holds two sets of weights: those in use and those staged by a weight
update. How requests wait, who may call what and when is the server's business.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, Self

from rlcore.config import RunConfig
from rlcore.config.cores import Cores, threads_on
from rlcore.errors import ConfigError
from rlcore.registry import Registry
from rlcore.rollout.sampling_params import SamplingParams
from rlcore.types import TokenOutput, WeightMeta


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineRequest:
    """One request as it enters the engine."""

    request_id: str
    prompt_ids: list[int]
    """With the `params.position` tokens of this turn at its end."""
    params: SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class VllmSpec:
    """What only vLLM reads; verl's keys of `actor_rollout_ref.rollout`."""

    tensor_parallel_size: int = 1
    """Processes, each with a device, that share the weights."""
    data_parallel_size: int = 1
    """Engines inside one replica."""
    is_expert_parallel: bool = False
    """Experts are shared by all devices of the replica."""
    memory_share: float = 0.5
    """Of a GPU's memory that the engine takes."""
    max_num_batched_tokens: int = 8192
    """Tokens of one step at most."""
    enforce_eager: bool = False
    """No CUDA graphs; on a CPU nothing is compiled either way."""
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    sleep_level: int = 1
    """Of a GPU: 1 keeps the weights in the host's memory, 2 drops them."""

    @classmethod
    def from_config(cls, config: RunConfig) -> Self:
        """Read `actor_rollout_ref.rollout`."""
        rollout = config.actor_rollout_ref.rollout
        return cls(
            tensor_parallel_size=rollout.tensor_model_parallel_size,
            data_parallel_size=rollout.data_parallel_size,
            is_expert_parallel=rollout.expert_parallel_size > 1,
            memory_share=rollout.gpu_memory_utilization,
            max_num_batched_tokens=rollout.max_num_batched_tokens,
            enforce_eager=rollout.enforce_eager,
            enable_chunked_prefill=rollout.enable_chunked_prefill,
            enable_prefix_caching=rollout.enable_prefix_caching,
            sleep_level=rollout.sleep_level,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpec:
    """What an engine is built from; crosses process borders."""

    name: str
    """`actor_rollout_ref.rollout.name`: entry of `ENGINES`."""
    model_path: str
    dtype: str
    """Type of weights and arithmetic: bfloat16 or float32."""
    max_num_seqs: int
    """Slots."""
    max_model_len: int
    """Prompt and response tokens of one request at most."""
    num_threads: int | None
    """CPU threads; None: as many as cores."""
    trust_remote_code: bool = False
    cores: Cores = ()
    """Numbers of the cores that it computes on; empty: all."""
    task: Literal["generate", "classify"] = "generate"
    """`classify`: a reward model that scores texts."""
    vllm: VllmSpec = VllmSpec()

    @classmethod
    def from_config(cls, config: RunConfig, cores: Cores = ()) -> Self:
        """Read `actor_rollout_ref.{model,rollout}`, `data` lengths and `ray.num_threads`."""
        model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
        return cls(
            name=rollout.name,
            model_path=model.path,
            dtype=rollout.dtype,
            max_num_seqs=rollout.max_num_seqs,
            max_model_len=rollout.max_model_len or config.max_model_len,
            num_threads=threads_on(config, cores),
            trust_remote_code=model.trust_remote_code,
            cores=cores,
            vllm=VllmSpec.from_config(config),
        )


class Engine(Protocol):
    """A model that generates. All calls come from the thread that built it."""

    max_num_seqs: int

    @property
    def weight_version(self) -> int:
        """Version of the weights in use; 0 for those of the model folder."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens sampled so far."""
        ...

    @property
    def in_flight(self) -> list[str]:
        """Ids of the requests that wait for a slot or run."""
        ...

    def check(self, request: EngineRequest) -> None:
        """Refuse a request that can never run; callable from any thread.

        Raises:
            ConfigError: its length or parameters are impossible.
        """
        ...

    def add(self, request: EngineRequest) -> None:
        """Queue a checked request."""
        ...

    def step(self) -> list[tuple[str, TokenOutput]]:
        """Do one forward pass (prompts or one token per slot); return what it finished.

        An engine with processes of its own goes on by itself and waits for them here, for a moment.
        """
        ...

    def hold(self) -> None:
        """Sample nothing from now on until `go_on`; what was sampled is complete on return.

        For engines that sample besides `step`. A repeated call does nothing.
        """
        ...

    def go_on(self) -> None:
        """End `hold`; without one it does nothing."""
        ...

    def abort(self, request_id: str) -> TokenOutput | None:
        """End a request; return its tokens with stop reason `aborted`, None for an unknown one."""
        ...

    def partial(self, request_id: str) -> TokenOutput | None:
        """Return a copy of a request's tokens so far, stop reason empty; None for an unknown id."""
        ...

    def stage_weights(self, meta: WeightMeta) -> str:
        """Load published weights beside those in use; return the checksum of what came.

        Raises:
            WeightSyncError: they do not fit the model.
            WeightTransferError: the bytes are damaged, or the sender died or stalled.
        """
        ...

    def commit_weights(self, version: int) -> None:
        """Use the staged weights from the next step on, as `version`."""
        ...

    def release_cache(self) -> None:
        """Free the memory of keys and values; nothing may be in flight."""
        ...

    def restore_cache(self) -> None:
        """Get the memory again."""
        ...

    def close(self) -> None:
        """End the processes of its own, if it has any; the last call."""
        ...


def check_length(request: EngineRequest, max_model_len: int) -> None:
    """Refuse a request that does not fit a model, or that has no prompt.

    Raises:
        ConfigError: it is too long, has no prompt, or resumes more than there is.
    """
    prompt, params = len(request.prompt_ids), request.params
    if prompt - params.position < 1:
        raise ConfigError(
            f"request {request.request_id}: {prompt} prompt tokens, of which the last "
            f"{params.position} were sampled before, leave no prompt"
        )
    if prompt + params.max_tokens > max_model_len:
        raise ConfigError(
            f"request {request.request_id}: {prompt} prompt tokens + max_tokens "
            f"{params.max_tokens} = {prompt + params.max_tokens} exceed max_model_len "
            f"{max_model_len}"
        )


ENGINES: Registry[Callable[[EngineSpec], Engine]] = Registry("rollout engine")


def build_engine(spec: EngineSpec) -> Engine:
    """Build the engine that `spec` names.

    For actors: Ray ships an actor's class with the objects that its code names. The registry would
    travel with what user modules have put into it, which can be read only after these are loaded.

    Raises:
        ConfigError: there is none of that name, or it cannot run the model.
    """
    return ENGINES.get(spec.name)(spec)


@ENGINES.register("transformers")
def _transformers(spec: EngineSpec) -> Engine:
    # Imported on use: an engine's library is needed only where it is chosen.
    if spec.task == "classify":
        from rlcore.rollout.classifier_engine import ClassifierEngine

        return ClassifierEngine(spec)
    from rlcore.rollout.transformers_engine import TransformersEngine

    return TransformersEngine(
        spec.model_path,
        spec.dtype,
        spec.max_num_seqs,
        spec.max_model_len,
        spec.num_threads,
        trust_remote_code=spec.trust_remote_code,
    )


@ENGINES.register("vllm")
def _vllm(spec: EngineSpec) -> Engine:
    if spec.task != "generate":
        raise ConfigError(f"the engine vllm does not {spec.task}; choose transformers")
    try:
        from rlcore.rollout.vllm_engine import VllmEngine
    except ImportError as error:
        raise ConfigError(
            f"actor_rollout_ref.rollout.name=vllm: vllm cannot be imported ({error}); run `make "
            "setup-vllm` and use .venv-vllm, or install vllm"
        ) from error
    return VllmEngine(spec)
