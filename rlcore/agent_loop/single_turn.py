"""The default agent loop: the prompt, one response."""

import time
import uuid
from typing import Any

from rlcore.agent_loop.base import AgentLoopBase, register
from rlcore.data.tokenizer import cut_prompt
from rlcore.types import AgentLoopOutput


@register("single_turn_agent")
class SingleTurnAgentLoop(AgentLoopBase):
    """Asks once; every token of the response was sampled."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        """Return the one trajectory of the session."""
        data = self.data_config
        whole = await self.apply_chat_template(row["raw_prompt"])
        prompt_ids = cut_prompt(whole, data.max_prompt_length, data.truncation)
        begin = time.monotonic()
        output = await self.server_manager.generate(uuid.uuid4().hex, prompt_ids, sampling_params)
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=output.token_ids,
            response_mask=[1] * len(output.token_ids),
            response_logprobs=output.log_probs,
            weight_versions=output.weight_versions,
            num_turns=2,
            metrics={"generate_sequences": time.monotonic() - begin},
            extra_fields={"stop_reason": output.stop_reason},
        )
