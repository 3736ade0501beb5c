"""Rewards of a model that shares the training devices: computed when a batch is complete.

verl's colocated reward model: it is awake in phase compute_reward only, while the policy's replicas
sleep. What it says goes into the rows (`rm_scores`), which later phases read. A response that
cannot be scored ends the phase with its row: its batch is leased already, and it is never 0.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from transformers import PreTrainedTokenizerBase

from rlcore.config import RunConfig
from rlcore.data.dataset import index_of_uid
from rlcore.errors import RewardError, RLCoreError, TransientError
from rlcore.reward.function import NUM_SAMPLED, Reward, RewardTask, make_task
from rlcore.reward.loop import RewardLoopManager
from rlcore.trainer.prompt_source import PromptSource
from rlcore.types import CallKey, PromptSpec, SampledBatch, SessionRecord


class AwakeOnDemand(Protocol):
    """A reward model that has memory while it is awake; see rlcore.cluster.reward_model."""

    address: str

    def wake_up(self, key: CallKey) -> None:
        """Get memory."""
        ...

    def sleep(self, key: CallKey) -> None:
        """Free it, when what was asked is answered."""
        ...


class RowStore(Protocol):
    """Reads and writes rows; see QueueClient."""

    def get(
        self, partition_id: str, keys: Sequence[str], columns: Sequence[str]
    ) -> dict[str, list[torch.Tensor]]:
        """Return columns."""
        ...

    def put(
        self,
        partition_id: str,
        keys: Sequence[str],
        columns: Mapping[str, Sequence[torch.Tensor]],
    ) -> None:
        """Write columns."""
        ...


class LateScorer:
    """Scores what agent loop workers have left unscored; used by phases, in their executor."""

    def __init__(
        self,
        config: RunConfig,
        prompts: PromptSource,
        queue: RowStore,
        model: AwakeOnDemand,
        key: CallKey,
    ) -> None:
        """Make a scorer.

        Args:
            config: Of the run.
            prompts: Gives the rows that responses belong to.
            queue: Holds the responses.
            model: The reward model.
            key: Of the phase.
        """
        self._config = config
        self._prompts = prompts
        self._queue = queue
        self._model = model
        self._key = key

    def score_batch(self, partition_id: str, batch: SampledBatch) -> SampledBatch:
        """Score the sessions of a batch by their last trajectories; write `rm_scores`.

        Returns:
            The batch, its tags with rewards.

        Raises:
            RewardError: a response cannot be scored; names its row.
            ActorUnavailableError: the reward model is not there.
        """
        unscored = [i for i, tag in enumerate(batch.tags) if tag["reward"] is None]
        if not unscored:
            return batch
        keys = [batch.keys[i] for i in unscored]
        rows = self._queue.get(partition_id, keys, ["responses", "response_mask"])
        responses = dict(zip(unscored, rows["responses"], strict=True))
        last = {_session(batch.tags[i]): i for i in unscored}
        tokenizer = self._prompts.tokenizer()
        tasks = {
            session: self._task(batch.tags[i], responses[i], tokenizer, batch.global_step)
            for session, i in last.items()
        }
        outcomes = self._score_all(list(tasks.values()))
        rewards: dict[Any, Reward] = {}
        for session, outcome in zip(tasks, outcomes, strict=True):
            if isinstance(outcome, Exception):
                origin = self._prompts.train_origin(index_of_uid(session[0]))
                raise RewardError(f"{origin}, session {session[1]}: {outcome}") from outcome
            rewards[session] = outcome
        scores = [rewards[_session(batch.tags[i])].score for i in unscored]
        placed = [_place(score, m) for score, m in zip(scores, rows["response_mask"], strict=True)]
        self._queue.put(partition_id, keys, {"rm_scores": placed})
        tags = list(batch.tags)
        for i in unscored:
            reward = rewards[_session(tags[i])]
            tags[i] = {**tags[i], "reward": reward.score, "reward_extra": reward.extra}
        return replace(batch, tags=tags)

    def score_settled(
        self,
        specs: Sequence[PromptSpec],
        settled: Mapping[str, Sequence[SessionRecord]],
        texts: Mapping[str, str],
    ) -> dict[str, list[SessionRecord]]:
        """Return how the sessions of a validation ended, with rewards.

        One that cannot be scored has failed, as one whose worker could not score it.

        Args:
            specs: The held-out prompts.
            settled: Uid -> how its sessions ended.
            texts: Row key -> response.

        Raises:
            ActorUnavailableError: the reward model is not there.
        """
        by_uid = {spec.uid: spec for spec in specs}
        waiting = [
            (uid, record) for uid, records in settled.items() for record in records
            if record.is_unscored
        ]  # fmt: skip
        tasks = [
            make_task(
                by_uid[uid].fields,
                by_uid[uid].raw_prompt,
                texts[record.keys[-1]],
                num_tokens=record.reward_extra[NUM_SAMPLED],
                extra_info={
                    **_inputs(record.reward_extra),
                    "phase": "validate",
                    "global_steps": by_uid[uid].global_step,
                    "num_turns": record.num_turns,
                },
            )
            for uid, record in waiting
        ]
        outcomes = self._score_all(tasks)
        found = {
            (uid, record.session_id): _scored(record, outcome)
            for (uid, record), outcome in zip(waiting, outcomes, strict=True)
        }
        return {
            uid: [found.get((uid, record.session_id), record) for record in records]
            for uid, records in settled.items()
        }

    def _task(
        self,
        tag: Mapping[str, Any],
        response: torch.Tensor,
        tokenizer: PreTrainedTokenizerBase,
        global_step: int,
    ) -> RewardTask:
        fields = self._prompts.train_fields(index_of_uid(tag["uid"]))
        text = tokenizer.decode(response.tolist(), skip_special_tokens=True)
        return make_task(
            fields,
            fields["raw_prompt"],
            str(text),
            num_tokens=tag["reward_extra"][NUM_SAMPLED],
            extra_info={
                **_inputs(tag["reward_extra"]),
                "phase": "train",
                "global_steps": global_step,
                "num_turns": tag.get("num_turns", 2),
            },
        )

    def _score_all(self, tasks: Sequence[RewardTask]) -> list[Reward | Exception]:
        """Score tasks side by side; what cannot be scored is its error.

        Raises:
            TransientError: the reward model is not there.
        """
        if not tasks:
            return []
        outcomes = asyncio.run(self._score(tasks))
        for outcome in outcomes:
            if isinstance(outcome, TransientError):
                raise outcome
        return outcomes

    async def _score(self, tasks: Sequence[RewardTask]) -> list[Reward | Exception]:
        manager = RewardLoopManager(self._config, self._model.address)

        async def score(task: RewardTask) -> Reward | Exception:
            try:
                return await manager.score(task)
            except RLCoreError as error:
                return error

        try:
            # Before the model wakes up: what cannot start costs no memory of the devices.
            await manager.start()
            self._model.wake_up(self._key)
            try:
                return await asyncio.gather(*(score(task) for task in tasks))
            finally:
                self._model.sleep(self._key)
        finally:
            await manager.close()


def with_stored_rewards(queue: RowStore, partition_id: str, batch: SampledBatch) -> SampledBatch:
    """Return the batch with the rewards of its rows in the tags that have none."""
    unscored = [i for i, tag in enumerate(batch.tags) if tag["reward"] is None]
    if not unscored:
        return batch
    keys = [batch.keys[i] for i in unscored]
    rows = queue.get(partition_id, keys, ["rm_scores"])["rm_scores"]
    tags = list(batch.tags)
    for i, row in zip(unscored, rows, strict=True):
        tags[i] = {**tags[i], "reward": float(row.sum())}
    return replace(batch, tags=tags)


def _inputs(reward_extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the agent loop tells the reward function."""
    return {name: value for name, value in reward_extra.items() if name != NUM_SAMPLED}


def _session(tag: Mapping[str, Any]) -> tuple[str, int]:
    return tag["uid"], tag["session_id"]


def _place(score: float, mask: torch.Tensor) -> torch.Tensor:
    """Return token scores [T]: the score at the last sampled token."""
    scores = torch.zeros(len(mask), dtype=torch.float32)
    sampled = mask.nonzero()
    scores[int(sampled[-1]) if len(sampled) else -1] = score
    return scores


def _scored(record: SessionRecord, outcome: Reward | Exception) -> SessionRecord:
    if isinstance(outcome, Exception):
        return replace(
            record,
            is_unscored=False,
            reward_extra={},
            error_type=type(outcome).__name__,
            error_message=str(outcome),
        )
    return replace(record, is_unscored=False, reward=outcome.score, reward_extra=outcome.extra)
