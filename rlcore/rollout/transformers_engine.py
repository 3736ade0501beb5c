"""The embedded engine: a transformers model with a fixed number of slots, on any CPU.

Legend: S slots, L columns of a slot, V vocabulary.

What a response depends on: weights, prompt tokens, seed, thread count, slot count and nothing else;
not on the other requests, not on when they come or go, not on an abort and a resume. Tokens and
log-probs are bitwise the same, because every matrix product that touches a request has a shape that
depends on the request alone:

* Decode runs over all S slots in every iteration, idle ones included, and attends block by block
  (`slot_cache`).
* A prompt, without its last token, is prefilled in a batch whose shape follows from the prompt's
  own length: padded to a bucket, with a fixed number of rows per bucket. The last prompt token goes
  through decode like a sampled one, so all logits come from decode.
* Tokens that a resumed request has sampled before (`position`) are fed through decode again, one by
  one, instead of being prefilled: prefill would round differently. With `exact_resume=False` they
  are prefilled, faster and no longer bitwise equal.

Needs the row count that makes a row of a matrix product independent of the others: at least 16.
"""

import logging
from collections import deque
from typing import Any

import torch
from transformers import PreTrainedModel

from rlcore.errors import ConfigError
from rlcore.pretrained import eos_ids, load_causal_lm
from rlcore.rollout.engine import EngineRequest, check_length
from rlcore.rollout.prefix_index import PrefixIndex
from rlcore.rollout.sampling import SlotSampler, uniform
from rlcore.rollout.slot_cache import ATTENTION_NAME, SlotCache
from rlcore.rollout.slot_table import SlotTable
from rlcore.rollout.staged_weights import StagedWeights
from rlcore.rollout.stop_strings import StopStringReader
from rlcore.types import TokenOutput, WeightMeta

logger = logging.getLogger(__name__)

MIN_SLOTS = 16
PREFILL_BUCKET = 8
"""Prompts are padded to a multiple of this."""
PREFILL_TOKENS = 512
"""Tokens of a prefill batch at most, padding included: rows per bucket follow from it."""


class TransformersEngine:
    """Generates with a causal transformers model (`rlcore.rollout.engine.Engine`).

    Example:
        >>> engine = TransformersEngine("models/tiny", "float32", 16, 128, 1)
        >>> params = SamplingParams(max_tokens=4, seed=1)
        >>> engine.add(EngineRequest(request_id="a", prompt_ids=[5, 6, 7], params=params))
        >>> while not (done := engine.step()): ...
    """

    def __init__(
        self,
        model_path: str,
        dtype: str,
        max_num_seqs: int,
        max_model_len: int,
        num_threads: int | None = None,
        *,
        trust_remote_code: bool = False,
        exact_resume: bool = True,
    ) -> None:
        """Load the model.

        Args:
            model_path: Hugging Face folder.
            dtype: bfloat16 or float32.
            max_num_seqs: slots, at least 16.
            max_model_len: prompt and response tokens of one request at most.
            num_threads: CPU threads of this process; None leaves torch's choice. Sums differ
                between thread counts, so a repeatable run pins it.
            trust_remote_code: let the model folder run code of its own.
            exact_resume: replay the tokens of a resumed request (see above).

        Raises:
            ConfigError: too few slots, an unknown type, or a model this engine cannot run.
        """
        if max_num_seqs < MIN_SLOTS:
            raise ConfigError(
                f"actor_rollout_ref.rollout.max_num_seqs is {max_num_seqs}, must be at least "
                f"{MIN_SLOTS}: with fewer rows a response depends on its neighbours in the batch"
            )
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self._exact_resume = exact_resume
        self._model = _load_model(model_path, dtype, trust_remote_code)
        config = self._model.config.get_text_config()
        _check_model(config, model_path, max_model_len)
        self._eos_ids = eos_ids(self._model)
        self._cache = SlotCache(
            num_layers=config.num_hidden_layers,
            num_slots=max_num_seqs,
            num_columns=-(-max_model_len // PREFILL_BUCKET) * PREFILL_BUCKET,
            num_heads=config.num_key_value_heads,
            group=config.num_attention_heads // config.num_key_value_heads,
            head_size=getattr(config, "head_dim", None)
            or config.hidden_size // config.num_attention_heads,
            dtype=self._model.dtype,
        )
        self._sampler = SlotSampler(max_num_seqs, config.vocab_size)
        self._slots = SlotTable(max_num_seqs, max_model_len)
        self._prefixes = PrefixIndex(max_num_seqs)
        self._weights = StagedWeights(self._model)
        self._stop_strings = StopStringReader(model_path, trust_remote_code)
        self._waiting: deque[EngineRequest] = deque()
        self._to_prefill: dict[tuple[int, ...], list[int]] = {}
        self._version = 0
        self._num_tokens = 0

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
        """Ids of the requests that wait for a slot or run."""
        return [*(r.request_id for r in self._waiting), *self._slots.request_ids]

    def check(self, request: EngineRequest) -> None:
        """Refuse a request that can never run.

        Raises:
            ConfigError: it is too long, has no prompt, or resumes more than there is.
        """
        check_length(request, self.max_model_len)
        self._stop_strings.check(request.params)

    def add(self, request: EngineRequest) -> None:
        """Queue a checked request; it starts when a slot is free, first come, first served."""
        self._waiting.append(request)

    @torch.inference_mode()
    def step(self) -> list[tuple[str, TokenOutput]]:
        """Prefill one batch of prompts if there is one to do, else sample a token per slot."""
        self._fill_slots()
        if self._to_prefill:
            self._prefill()
            return []
        if not self._slots.active.any():
            return []
        return self._decode()

    def hold(self) -> None:
        """Do nothing: nothing is sampled between two steps."""

    def go_on(self) -> None:
        """Do nothing: nothing is sampled between two steps."""

    def abort(self, request_id: str) -> TokenOutput | None:
        """End a request and return what it has; None when it is not here."""
        for request in self._waiting:
            if request.request_id == request_id:
                self._waiting.remove(request)
                return TokenOutput(
                    token_ids=[], log_probs=[], weight_versions=[], stop_reason="aborted"
                )
        slot = self._slots.find(request_id)
        if slot is None:
            return None
        output = self._slots.output(slot, "aborted")
        for key in [k for k, slots in self._to_prefill.items() if slot in slots]:
            self._to_prefill[key].remove(slot)
            if not self._to_prefill[key]:
                del self._to_prefill[key]
        self._slots.free(slot)
        return output

    def partial(self, request_id: str) -> TokenOutput | None:
        """Return a request's tokens so far; None when it holds no slot."""
        slot = self._slots.find(request_id)
        return None if slot is None else self._slots.output(slot, "")

    def stage_weights(self, meta: WeightMeta) -> str:
        """Bring published weights into the second set; return the checksum of what came.

        Raises:
            WeightSyncError: they do not fit the model.
            WeightTransferError: the bytes are damaged, or the sender died or stalled.
        """
        return self._weights.stage(meta)

    def commit_weights(self, version: int) -> None:
        """Swap the two sets of weights; requests in flight keep their keys and values.

        Raises:
            WeightSyncError: nothing is staged under `version`.
        """
        self._weights.commit(version)
        self._version = version
        # Keys and values of older weights serve no new request.
        self._prefixes.clear()

    def release_cache(self) -> None:
        """Free the memory of keys and values."""
        if self.in_flight:
            raise ConfigError(f"requests are in flight: {', '.join(self.in_flight[:8])}")
        self._prefixes.clear()
        self._cache.release()

    def restore_cache(self) -> None:
        """Get the memory of keys and values again, empty."""
        self._cache.allocate()

    def close(self) -> None:
        """Do nothing: there are no processes."""

    # Slots

    def _fill_slots(self) -> None:
        copies: list[tuple[int, int, int]] = []  # source slot, target slot, prefix length
        while self._waiting and self._slots.has_free:
            request = self._waiting.popleft()
            replayed = request.params.position if self._exact_resume else 0
            prompt = request.prompt_ids[: len(request.prompt_ids) - replayed]
            prefix = tuple(prompt[:-1])
            source = self._prefixes.find(prefix)
            slot = self._slots.take(prefer=source)
            if slot != source:
                self._prefixes.forget(slot)
            stops = self._stop_strings.of(request)
            self._slots.start(slot, request, prompt, replayed, self._eos_ids, stops)
            self._cache.start_slot(slot, len(prefix))
            if not prefix or slot == source:
                self._slots.active[slot] = True
            elif source is not None:
                copies.append((source, slot, len(prefix)))
            else:
                self._to_prefill.setdefault(prefix, []).append(slot)
        if copies:
            sources, targets, lengths = map(list, zip(*copies, strict=True))
            self._cache.copy_prefix(sources, targets, _padded(max(lengths)))
            for _, slot, _ in copies:
                self._ready(slot)

    def _ready(self, slot: int) -> None:
        self._prefixes.remember(slot, self._slots.prefix(slot))
        self._slots.active[slot] = True

    def _prefill(self) -> None:
        """Prefill the oldest prompt and others of its bucket; a group's prompt once."""
        length = _padded(len(next(iter(self._to_prefill))))
        num_rows = _prefill_rows(length)
        batch = [p for p in self._to_prefill if _padded(len(p)) == length][:num_rows]
        ids = torch.zeros(num_rows, length, dtype=torch.long)
        rows: list[int] = []
        slots: list[int] = []
        for row, prefix in enumerate(batch):
            ids[row, : len(prefix)] = torch.tensor(prefix)
            targets = self._to_prefill.pop(prefix)
            rows += [row] * len(targets)
            slots += targets
        self._cache.begin_prefill(rows, slots)
        # The base model: logits of the prompt are not needed.
        self._model.base_model(
            input_ids=ids,
            position_ids=torch.arange(length)[None].expand(num_rows, -1),
            past_key_values=self._cache,
            use_cache=True,
        )
        for slot in slots:
            self._ready(slot)

    def _decode(self) -> list[tuple[str, TokenOutput]]:
        slots = self._slots
        positions = torch.from_numpy(slots.position)
        mask = self._cache.begin_decode(positions, slots.width)
        logits = self._model(
            input_ids=torch.from_numpy(slots.next_token)[:, None],
            position_ids=positions[:, None],
            attention_mask=mask,
            past_key_values=self._cache,
            use_cache=True,
        ).logits[:, -1]
        tokens, log_probs = self._sampler.sample(
            logits,
            slots.temperature,
            slots.do_sample,
            uniform(slots.seed, slots.turn_position),
            slots.top_p,
            slots.top_k,
        )
        finished, num_sampled = slots.advance(tokens, log_probs, self._version)
        self._num_tokens += num_sampled
        results: list[tuple[str, TokenOutput]] = []
        for slot, reason in finished:
            results.append((slots.request_id(slot), slots.output(slot, reason)))
            slots.free(slot)
        return results


def _padded(length: int) -> int:
    return -(-length // PREFILL_BUCKET) * PREFILL_BUCKET


def _prefill_rows(length: int) -> int:
    """Rows of a prefill batch: a power of two, since batches of prompts mostly are."""
    return 1 << (max(1, PREFILL_TOKENS // length).bit_length() - 1)


def _load_model(path: str, dtype: str, trust_remote_code: bool) -> PreTrainedModel:
    if dtype not in ("bfloat16", "float32"):
        raise ConfigError(f"rollout engine transformers: dtype {dtype!r}, not bfloat16 or float32")
    model = load_causal_lm(
        path,
        getattr(torch, dtype),
        trust_remote_code=trust_remote_code,
        attn_implementation=ATTENTION_NAME,
    )
    return model.requires_grad_(False)


def _check_model(config: Any, path: str, max_model_len: int) -> None:
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ConfigError(
            f"{path}: layers of kind {', '.join(sorted(kinds))}; the transformers engine runs "
            "models with full attention in every layer"
        )
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and max_model_len > limit:
        raise ConfigError(
            f"{path}: data.max_prompt_length + data.max_response_length = {max_model_len} exceed "
            f"the model's {limit} positions"
        )
