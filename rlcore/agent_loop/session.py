"""One session: an agent loop run under a deadline, its reward, its rows; failures become data."""

import logging
import time
import traceback
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlcore.agent_loop.choice import AgentLoopChooser
from rlcore.agent_loop.endpoint.server import Endpoint
from rlcore.agent_loop.rows import Row, check_output, complete_output, make_row, make_tag
from rlcore.config import RunConfig
from rlcore.environments.host import EnvironmentHost
from rlcore.errors import FencedError, TransientError
from rlcore.reward.function import NUM_SAMPLED, Reward, check_result, make_task
from rlcore.reward.loop import RewardScorer
from rlcore.rollout.client import LLMServerClient, SessionClient
from rlcore.rollout.pausable import PausableTimeout
from rlcore.tools.toolbox import Toolbox
from rlcore.types import BASELINE_TAG, AgentLoopOutput, PromptSpec, SessionRecord

logger = logging.getLogger(__name__)

TRACEBACK_LINES = 12


@dataclass(kw_only=True, slots=True)
class SessionResult:
    """How a session ended, and the rows to be stored."""

    record: SessionRecord
    rows: list[Row] = field(default_factory=list[Row])


class SessionRunner:
    """Runs sessions of prompts; holds what they share."""

    def __init__(
        self,
        config: RunConfig,
        client: LLMServerClient,
        tokenizer: PreTrainedTokenizerBase,
        rewards: RewardScorer | None,
        stop_token_ids: list[int],
    ) -> None:
        """Make a runner.

        Args:
            config: Of the run.
            client: Generates.
            tokenizer: The policy's.
            rewards: Scores; None: sessions are scored later.
            stop_token_ids: End a turn.
        """
        self._config = config
        self._client = client
        self._tokenizer = tokenizer
        self._rewards = rewards
        self._stop_token_ids = stop_token_ids
        self._deadline_s = config.deadlines.session
        self._toolbox = Toolbox(config)
        self._environments = EnvironmentHost(config)
        self._endpoint = Endpoint(config, tokenizer)
        agent = config.actor_rollout_ref.rollout.agent
        self._agent_loops = AgentLoopChooser(agent.default_agent_loop, agent.agent_loop_config_path)

    async def start(self) -> None:
        """Get ready, and tell what the default agent loop has to say about this run.

        Raises:
            ConfigError: the reward function or the agent loop cannot be used.
        """
        loop_class = self._agent_loops.choose(None).loop_class
        for notice in loop_class.check_at_start(self._config, self._tokenizer):
            logger.warning("%s", notice)
        if self._rewards is not None:
            await self._rewards.start()

    async def close(self) -> None:
        """End the processes of rewards, tools and environments, and the endpoint."""
        if self._rewards is not None:
            await self._rewards.close()
        await self._toolbox.close()
        await self._environments.close()
        await self._endpoint.close()

    def has_baseline(self, spec: PromptSpec) -> bool:
        """Whether a greedy session belongs to the prompt, as number `spec.num_sessions`."""
        return self._config.needs_baseline and not spec.validate

    async def run(self, spec: PromptSpec, session_id: int) -> SessionResult:
        """Run one session to its end; one beyond `spec.num_sessions` is greedy.

        What the agent loop, a tool or the reward function raises, and an overdue session, become a
        failed record. Time in which no replica serves is not the session's.

        Raises:
            TransientError: a replica or another collaborator is not there: the session did not
                fail, the prompt has to be done again.
            FencedError: this worker belongs to an older attempt.
        """
        data = self._config.data
        deadline = PausableTimeout(self._deadline_s)
        server = self._client.for_session(
            prompt_identity(spec),
            session_id,
            max_tokens=data.max_response_length,
            max_model_len=data.max_prompt_length + data.max_response_length,
            deadline=deadline,
        )
        try:
            async with deadline:
                outputs = await self._run_loop(spec, session_id, server)
                started = time.monotonic()
                reward = await self._score(spec, outputs[-1])
                outputs[-1].metrics["compute_score"] = time.monotonic() - started
            return _finished(spec, session_id, outputs, reward)
        except (TransientError, FencedError):
            raise
        except Exception as error:  # user code may raise anything
            logger.warning(
                "session %d of %s failed",
                session_id,
                describe(spec),
                exc_info=not deadline.expired(),
            )
            if isinstance(error, TimeoutError) and deadline.expired():
                error = TimeoutError(
                    f"not finished after deadlines.session={self._deadline_s:g} s; "
                    f"{server.num_turns} turns were begun"
                )
            return SessionResult(record=_failed(spec, session_id, error))

    async def _run_loop(
        self, spec: PromptSpec, session_id: int, server: SessionClient
    ) -> list[AgentLoopOutput]:
        choice = self._agent_loops.choose(spec.fields.get("agent_name"))
        loop = choice.loop_class(
            trainer_config=self._config,
            server_manager=server,
            tokenizer=self._tokenizer,
            data_config=self._config.data,
            **choice.kwargs,
        )
        loop.tools = self._toolbox
        loop.environments = self._environments
        loop.endpoint = self._endpoint
        row = {
            **spec.fields,
            "raw_prompt": spec.raw_prompt,
            "uid": spec.uid,
            "session_id": session_id,
            "index": spec.index,
            "global_steps": spec.global_step,
            "validate": spec.validate,
        }
        is_baseline = session_id >= spec.num_sessions
        result = await loop.run(self.sampling_params(spec.validate, greedy=is_baseline), **row)
        outputs = result if isinstance(result, list) else [result]
        if not outputs:
            raise ValueError(f"agent loop {choice.loop_class.__name__} returned an empty list")
        data = self._config.data
        for output in outputs:
            check_output(
                output,
                max_prompt_length=data.max_prompt_length,
                max_response_length=data.max_response_length,
            )
            complete_output(output, server.turns)
        return outputs

    def sampling_params(self, validate: bool, *, greedy: bool = False) -> dict[str, Any]:
        """Return the sampling parameters of training or validation, a new dict each time."""
        rollout = self._config.actor_rollout_ref.rollout
        source = rollout.val_kwargs if validate else rollout
        return {
            "temperature": source.temperature,
            "top_p": source.top_p,
            "top_k": source.top_k,
            "do_sample": rollout.val_kwargs.do_sample if validate else not greedy,
            "stop_token_ids": list(self._stop_token_ids),
        }

    async def _score(self, spec: PromptSpec, output: AgentLoopOutput) -> Reward | None:
        """Score a session by its last trajectory, unless its loop did; None: it is scored later."""
        if output.reward_score is not None:
            extra = output.extra_fields.get("reward_extra_info") or {"acc": output.reward_score}
            return check_result({"score": output.reward_score, **extra})
        if self._rewards is None:
            return None
        text = self._tokenizer.decode(output.response_ids, skip_special_tokens=True)
        assert isinstance(text, str)  # one sequence gives one text
        return await self._rewards.score(
            make_task(
                spec.fields,
                spec.raw_prompt,
                text,
                num_tokens=sum(output.response_mask),
                extra_info={
                    **_reward_inputs(output),
                    "phase": "validate" if spec.validate else "train",
                    "global_steps": spec.global_step,
                    "num_turns": output.num_turns,
                },
            )
        )


def _reward_inputs(output: AgentLoopOutput) -> dict[str, Any]:
    """Return what the agent loop tells the reward function."""
    extra = output.extra_fields
    return {"tool_rewards": extra.get("tool_rewards", []), **extra.get("for_reward", {})}


def _for_later(output: AgentLoopOutput) -> dict[str, Any]:
    """Return what scoring a complete batch needs besides the stored row."""
    return {**_reward_inputs(output), NUM_SAMPLED: sum(output.response_mask)}


def prompt_identity(spec: PromptSpec) -> str:
    """Name a prompt within its run: without the run id, so that a repeated run samples the same."""
    split = spec.partition_id.rpartition("/")[2]
    identity = f"{split}/{spec.epoch}/{spec.index}"
    return f"{identity}/{spec.repeat}" if spec.repeat else identity


def with_baseline(sessions: list[SessionResult], greedy: SessionResult) -> list[SessionResult]:
    """Return the sessions of a prompt with the greedy one's score in the tags of their rows.

    Where the greedy session failed, they all have: without its score nothing can be learned from
    them.
    """
    if greedy.record.is_failed:
        return [
            SessionResult(record=replace(greedy.record, session_id=session.record.session_id))
            for session in sessions
        ]
    for session in sessions:
        for tag in session.record.tags:
            tag[BASELINE_TAG] = greedy.record.reward
    return sessions


def describe(spec: PromptSpec) -> str:
    """Name a prompt for a person: file and row, uid."""
    return f"{spec.fields.get('origin', f'row {spec.index}')} (uid {spec.uid})"


def _finished(
    spec: PromptSpec, session_id: int, outputs: list[AgentLoopOutput], reward: Reward | None
) -> SessionResult:
    rows = [make_row(output, 0.0 if reward is None else reward.score) for output in outputs]
    metrics: dict[str, float] = {}
    for output in outputs:
        for name, value in output.metrics.items():
            metrics[name] = metrics.get(name, 0.0) + float(value)
    return SessionResult(
        record=SessionRecord(
            session_id=session_id,
            keys=[f"{spec.uid}_{session_id}_{index}" for index in range(len(rows))],
            tags=[
                {**make_tag(row, spec.global_step), "num_turns": output.num_turns}
                for row, output in zip(rows, outputs, strict=True)
            ],
            reward=None if reward is None else reward.score,
            reward_extra=_for_later(outputs[-1]) if reward is None else reward.extra,
            is_unscored=reward is None,
            num_turns=outputs[-1].num_turns,
            metrics=metrics,
        ),
        rows=rows,
    )


def _failed(spec: PromptSpec, session_id: int, error: Exception) -> SessionRecord:
    lines = "".join(traceback.format_exception(error)).rstrip().splitlines()
    tail = "\n".join(lines[-TRACEBACK_LINES:])
    return SessionRecord(
        session_id=session_id,
        keys=[],
        tags=[],
        error_type=type(error).__name__,
        error_message=f"{describe(spec)}, session {session_id}: {tail}",
    )
