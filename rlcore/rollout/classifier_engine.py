"""The engine of a discriminative reward model: one forward pass per text, no tokens.

A transformers model with a classification head, behind the same server, router and client as the
policy's engine: a request's answer holds the head's outputs as `extra_fields["logits"]`. One text
at a time: a score depends on weights, tokens and thread count only, not on its neighbours.
"""

from collections import deque

import torch
from safetensors import SafetensorError
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from rlcore.errors import ConfigError, WeightSyncError
from rlcore.rollout.engine import EngineRequest, EngineSpec
from rlcore.types import TokenOutput, WeightMeta


class ClassifierEngine:
    """Scores texts with a sequence classification model (`rlcore.rollout.engine.Engine`)."""

    def __init__(self, spec: EngineSpec) -> None:
        """Load the model.

        Raises:
            ConfigError: the folder is incomplete or holds no such model.
        """
        if spec.num_threads is not None:
            torch.set_num_threads(spec.num_threads)
        self.max_num_seqs = spec.max_num_seqs
        self._max_model_len = spec.max_model_len
        self._model = _load(spec)
        self._waiting: deque[EngineRequest] = deque()

    @property
    def weight_version(self) -> int:
        """Version of the weights: a reward model is not trained."""
        return 0

    @property
    def num_tokens(self) -> int:
        """Tokens sampled so far: none."""
        return 0

    @property
    def in_flight(self) -> list[str]:
        """Ids of the requests that wait."""
        return [request.request_id for request in self._waiting]

    def check(self, request: EngineRequest) -> None:
        """Refuse a text that is too long.

        Raises:
            ConfigError: it has no token or too many.
        """
        if not 0 < len(request.prompt_ids) <= self._max_model_len:
            raise ConfigError(
                f"request {request.request_id} has {len(request.prompt_ids)} tokens, must have 1 "
                f"to {self._max_model_len} (reward.reward_model.rollout.prompt_length)"
            )

    def add(self, request: EngineRequest) -> None:
        """Queue a checked text."""
        self._waiting.append(request)

    @torch.inference_mode()
    def step(self) -> list[tuple[str, TokenOutput]]:
        """Score the next text."""
        if not self._waiting:
            return []
        request = self._waiting.popleft()
        ids = torch.tensor([request.prompt_ids])
        logits = self._model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        output = _output("completed")
        output.extra_fields["logits"] = logits[0].float().tolist()
        return [(request.request_id, output)]

    def hold(self) -> None:
        """Do nothing: nothing is sampled between two steps."""

    def go_on(self) -> None:
        """Do nothing: nothing is sampled between two steps."""

    def abort(self, request_id: str) -> TokenOutput | None:
        """End a request; None for an unknown one."""
        for request in self._waiting:
            if request.request_id == request_id:
                self._waiting.remove(request)
                return _output("aborted")
        return None

    def partial(self, request_id: str) -> TokenOutput | None:
        """Return nothing: a score comes whole."""
        del request_id
        return None

    def stage_weights(self, meta: WeightMeta) -> str:
        """Refuse weights.

        Raises:
            WeightSyncError: always: a reward model is not trained.
        """
        raise WeightSyncError(f"a reward model takes no weights (version {meta.version})")

    def commit_weights(self, version: int) -> None:
        """Refuse weights.

        Raises:
            WeightSyncError: always: a reward model is not trained.
        """
        raise WeightSyncError(f"a reward model takes no weights (version {version})")

    def release_cache(self) -> None:
        """Do nothing: no keys and values are kept."""

    def restore_cache(self) -> None:
        """Do nothing: no keys and values are kept."""

    def close(self) -> None:
        """Do nothing: there are no processes."""


def _output(stop_reason: str) -> TokenOutput:
    return TokenOutput(token_ids=[], log_probs=[], weight_versions=[], stop_reason=stop_reason)


def _load(spec: EngineSpec) -> PreTrainedModel:
    try:
        model, found = AutoModelForSequenceClassification.from_pretrained(
            spec.model_path,
            dtype=getattr(torch, spec.dtype),
            trust_remote_code=spec.trust_remote_code,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ConfigError(
            f"reward.reward_model.model_path={spec.model_path}: the model cannot be loaded: "
            f"{type(error).__name__}: {error}"
        ) from error
    if found["missing_keys"]:
        # transformers would fill them at random: the rewards would be noise.
        raise ConfigError(
            f"reward.reward_model.model_path={spec.model_path}: no reward model with a head: "
            f"{', '.join(sorted(found['missing_keys']))} are missing; name a sequence "
            "classification model, or set reward.custom_reward_function.path to a function that "
            "asks this model as a judge"
        )
    return model.eval()
