"""The extension point for multi-turn behaviour: one agent loop object per session."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlcore.agent_loop.endpoint.server import Endpoint
from rlcore.config import RunConfig
from rlcore.config.data import DataConfig
from rlcore.data.tokenizer import encode_chat
from rlcore.environments.host import EnvironmentHost
from rlcore.registry import Registry
from rlcore.rollout.client import SessionClient
from rlcore.tools.toolbox import Toolbox
from rlcore.types import AgentLoopOutput

AGENT_LOOPS: Registry[type["AgentLoopBase"]] = Registry("agent loop")


def register(name: str) -> Callable[[type["AgentLoopBase"]], type["AgentLoopBase"]]:
    """Register an agent loop: rows choose it by `agent_name`, the config by `default_agent_loop`.

    Example:
        >>> @register("guess_twice")
        ... class GuessTwice(AgentLoopBase):
        ...     async def run(self, sampling_params, **row): ...

    Raises:
        ConfigError: the name belongs to another class.
    """
    return AGENT_LOOPS.register(name)


class AgentLoopBase(ABC):
    """One session: turns messages into trajectories by way of the engine, tools and user code.

    Attributes:
        config: The run's configuration.
        server_manager: Samples one turn per `generate(request_id, prompt_ids, sampling_params)`.
        tokenizer: The model's.
        loop: The worker's event loop, for `run_in_executor`.
        tools: The run's tools, given by the worker before `run`.
        environments: Where text environments are played, given by the worker before `run`.
        endpoint: Where agents ask that speak OpenAI's API, given by the worker before `run`.
    """

    tools: Toolbox
    environments: EnvironmentHost
    endpoint: Endpoint

    @classmethod
    def check_at_start(cls, config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """Check what sessions of this loop need, before the first one; return notices.

        Raises:
            ConfigError: no session could succeed; says why.
        """
        del config, tokenizer
        return []

    def __init__(
        self,
        trainer_config: RunConfig,
        server_manager: SessionClient,
        tokenizer: PreTrainedTokenizerBase,
        processor: Any = None,
        dataset_cls: Any = None,
        data_config: DataConfig | None = None,
        **kwargs: Any,
    ) -> None:
        self.config = trainer_config
        self.server_manager = server_manager
        self.tokenizer = tokenizer
        self.processor = processor
        self.dataset_cls = dataset_cls
        self.data_config = data_config or trainer_config.data
        self.loop = asyncio.get_running_loop()

    @abstractmethod
    async def run(
        self, sampling_params: dict[str, Any], **row: Any
    ) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Run the session.

        Args:
            sampling_params: To be passed on to `server_manager.generate`.
            **row: The data file's columns, with the chat messages as `raw_prompt`, and `uid`,
                `session_id`, `index`, `global_steps`, `validate`.

        Returns:
            One trajectory, or several when the session stores more than one.
        """

    async def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation, up to where the model's turn begins.

        Args:
            messages: The conversation.
            tools: OpenAI function schemas for the template.
        """
        kwargs = self.data_config.apply_chat_template_kwargs
        if tools:
            kwargs = {**kwargs, "tools": list(tools)}
        return encode_chat(self.tokenizer, messages, kwargs)
