"""The agent loop that plays a text environment: the row's prompt is its first observation.

    prompt -> generate -> environment answers as user -> generate -> ... -> the episode is over,
    a limit of `multi_turn` is met, or the response is full

Each turn is one action; a turn that was cut off is none. What the episode paid reaches the reward
function as `extra_info.environment_reward` (and `environment_solved`): the rule of the data source
passes it on, a function of one's own may do otherwise.
"""

import time
import uuid
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlcore.agent_loop.base import AgentLoopBase, register
from rlcore.agent_loop.chat_encoder import encoder_of
from rlcore.agent_loop.transcript import Transcript, why_stop
from rlcore.config import RunConfig
from rlcore.data.tokenizer import cut_prompt
from rlcore.environments.base import Observation, read_spec
from rlcore.environments.host import EpisodeTask
from rlcore.tools.functions import cut
from rlcore.types import AgentLoopOutput, TokenOutput


@register("environment_agent")
class EnvironmentAgentLoop(AgentLoopBase):
    """Plays the episode of `extra_info.environment`."""

    @classmethod
    def check_at_start(cls, config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """Probe the chat template.

        Raises:
            ConfigError: it cannot be used for several turns.
        """
        return encoder_of(config, tokenizer, uses_tools=False).notices

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        """Return the one trajectory of the session."""
        spec = read_spec(row.get("extra_info"))
        settings = self.config.actor_rollout_ref.rollout.multi_turn
        encoder = encoder_of(self.config, self.tokenizer, uses_tools=False)
        data = self.data_config
        prompt_ids = encoder.start(row["raw_prompt"])
        transcript = Transcript(
            prompt_ids=cut_prompt(prompt_ids, data.max_prompt_length, data.truncation)
        )
        episode_id = uuid.uuid4().hex
        actions: list[str] = []
        observation = Observation(text="")
        while True:
            output = await self._generate(transcript, episode_id, sampling_params)
            if output.stop_reason != "completed":
                transcript.stop = "length"
                break
            actions.append(self._text_of(output))
            started = time.monotonic()
            observation = await self.environments.step(
                EpisodeTask(episode_id=episode_id, spec=spec, actions=tuple(actions))
            )
            transcript.answer_s += time.monotonic() - started
            transcript.stop = (
                "done"
                if observation.is_done
                else why_stop(transcript, output, settings, data.max_response_length)
            )
            if transcript.stop:
                break
            text = cut(
                observation.text,
                settings.max_tool_response_length,
                settings.tool_response_truncate_side,
            )
            ids = encoder.following([{"role": "user", "content": text}])
            if len(transcript.ids) + len(ids) >= data.max_response_length:
                transcript.stop = "length"
                break
            transcript.add_context(ids)
        return transcript.output(
            metrics={"num_actions": float(len(actions))},
            extra_fields={
                "for_reward": {
                    "environment_reward": observation.reward,
                    "environment_solved": observation.is_solved,
                }
            },
        )

    async def _generate(
        self, transcript: Transcript, episode_id: str, sampling_params: dict[str, Any]
    ) -> TokenOutput:
        started = time.monotonic()
        left = self.data_config.max_response_length - len(transcript.ids)
        output = await self.server_manager.generate(
            episode_id,
            [*transcript.prompt_ids, *transcript.ids],
            {**sampling_params, "max_tokens": left},
        )
        transcript.generate_s += time.monotonic() - started
        transcript.add_sampled(output)
        return output

    def _text_of(self, output: TokenOutput) -> str:
        text = self.tokenizer.decode(output.token_ids, skip_special_tokens=True)
        assert isinstance(text, str)  # one sequence gives one text
        return text
