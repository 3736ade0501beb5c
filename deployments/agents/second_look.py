"""An agent that looks at its answer again; it knows OpenAI's client and nothing of rollflow.

The reward is None: the rules of the data score the last answer. A number, or a dict with `score`,
would be the reward itself.
"""

from collections.abc import Mapping
from typing import Any

from openai import AsyncOpenAI


async def agent(
    base_url: str, api_key: str, model: str, row: Mapping[str, Any], max_tokens: int = 64
) -> None:
    """Ask the row's question, then for a check of the answer.

    Args:
        base_url: Of this session.
        api_key: Of the run.
        model: Name of the policy.
        row: The data file's columns, with the chat messages as `raw_prompt`.
        max_tokens: Of the first answer, so that the second has room in the response.
    """
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages = list(row["raw_prompt"])
        first = await client.chat.completions.create(
            model=model, messages=messages, max_tokens=max_tokens
        )
        # As it came: a message that was changed would begin another trajectory.
        messages.append(first.choices[0].message.model_dump(exclude_none=True))
        messages.append({"role": "user", "content": "Look again. What is the answer?"})
        # Its text could be acted upon while it is written; a stream that is left early is no turn.
        async for _ in await client.chat.completions.create(
            model=model, messages=messages, stream=True
        ):
            pass
