"""The agent loop for agents written elsewhere against OpenAI's API: one function.

    - name: my_agent
      _target_: rlcore.agent_loop.OpenAIAgentLoop
      path: my_agent.py        # beside this list, or absolute
      function: agent          # the default
      settings: {depth: 3}     # further arguments of the function

    async def agent(base_url, api_key, model, row) -> float | dict | None:
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client: ...

A function without `async` runs in a thread of its own. Whatever it asks is answered by the policy
and recorded (rlcore/agent_loop/endpoint); what it returns is the session's reward, or a mapping
with `score`; None leaves that to the run's reward rules, which see the last trajectory. Requests
that were in flight when it returns are no part of the session.
"""

import asyncio
import inspect
import logging
import socket
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlcore.agent_loop.base import AgentLoopBase, register
from rlcore.agent_loop.chat_encoder import encoder_of
from rlcore.agent_loop.choice import read_agent_loops
from rlcore.agent_loop.endpoint.server import Access, fast
from rlcore.config import RunConfig
from rlcore.daemon_thread import in_daemon_thread
from rlcore.errors import ConfigError, RolloutError
from rlcore.reward.function import check_result
from rlcore.types import AgentLoopOutput
from rlcore.user_code import load_user_object

NAME = "openai_agent"
LIST_KEY = "actor_rollout_ref.rollout.agent.agent_loop_config_path"
HTTP_CLIENTS = ("httpx", "httpx2")
"""Loggers below the openai package, old and new."""
HOST_KEY = "actor_rollout_ref.rollout.agent.endpoint_host"


@register(NAME)
class OpenAIAgentLoop(AgentLoopBase):
    """Runs a function that asks the endpoint for what the model says."""

    @classmethod
    def check_at_start(cls, config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """Load the functions of all entries, try the host, probe the chat template.

        Raises:
            ConfigError: a function, the host, the tokenizer or its template cannot be used.
        """
        agent = config.actor_rollout_ref.rollout.agent
        path = agent.agent_loop_config_path
        choices = read_agent_loops(path) if path is not None else {}
        if agent.default_agent_loop not in choices:
            raise ConfigError(_without_list())
        for choice in choices.values():
            if issubclass(choice.loop_class, cls):
                load_agent(config, **choice.kwargs)
        fast(tokenizer)
        _try_host(agent.endpoint_host)
        # A client logs each request as if it were news: in a run they are the work itself.
        for name in HTTP_CLIENTS:
            _quiet(name)
        notices = encoder_of(config, tokenizer, uses_tools=False).notices
        return [*notices, *_proxy_notices(agent.endpoint_host)]

    def __init__(
        self,
        *args: Any,
        path: str | None = None,
        function: str = "agent",
        settings: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Make the loop of one session.

        Args:
            *args: See AgentLoopBase.
            path: Python file of the agent.
            function: What it is called there.
            settings: Further arguments of the function.
            **kwargs: See AgentLoopBase.
        """
        super().__init__(*args, **kwargs)
        self._agent = load_agent(self.config, path=path, function=function, settings=settings)
        self._settings = dict(settings or {})

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> list[AgentLoopOutput]:
        """Return the trajectories of the session.

        Raises:
            RolloutError: the agent has no finished request.
            TransientError: it failed because a replica was not there.
        """
        async with self.endpoint.session(self.server_manager, sampling_params) as (session, access):
            try:
                result = await self._call(access, row)
            except Exception as error:
                if session.outage is not None:
                    # Not the agent's failure: the prompt is to be done again.
                    raise session.outage from error
                raise
            outputs = session.trajectories()
        if not outputs:
            raise RolloutError(
                f"{inspect.getfile(self._agent)}: {self._agent.__name__} returned without a "
                "finished request to the endpoint (base_url), so there is nothing to train on"
            )
        _put_reward(outputs[-1], result)
        return outputs

    async def _call(self, access: Access, row: dict[str, Any]) -> object:
        arguments = {**asdict(access), "row": row, **self._settings}
        if inspect.iscoroutinefunction(self._agent):
            return await self._agent(**arguments)
        name = f"{NAME}-{row['uid']}-{row['session_id']}"
        return await asyncio.wrap_future(
            in_daemon_thread(lambda: self._agent(**arguments), name=name)
        )


def load_agent(
    config: RunConfig,
    *,
    path: str | None = None,
    function: str = "agent",
    settings: Mapping[str, Any] | None = None,
    **unknown: Any,
) -> Callable[..., Any]:
    """Return the user's function.

    Args:
        config: Of the run.
        path: Python file; relative to the list of agent loops that names it.
        function: What it is called there.
        settings: Further arguments of the function.
        **unknown: Must be empty.

    Raises:
        ConfigError: it is not there, or cannot take its arguments.
    """
    list_path = config.actor_rollout_ref.rollout.agent.agent_loop_config_path
    if path is None or list_path is None:
        raise ConfigError(_without_list())
    if unknown:
        raise ConfigError(
            f"{list_path}: {NAME} takes path, function and settings, not "
            f"{', '.join(sorted(unknown))}"
        )
    file = Path(list_path).parent / path
    agent = load_user_object(file, function)
    if not callable(agent):
        raise ConfigError(f"{file}: {function!r} is not a function")
    names = ("base_url", "api_key", "model", "row", *(settings or {}))
    try:
        inspect.signature(agent).bind(**dict.fromkeys(names))
    except TypeError as error:
        raise ConfigError(f"{file}: {function} must take {', '.join(names)}: {error}") from error
    return agent


def _without_list() -> str:
    return (
        f"{NAME} needs a function of yours: name it as `path` in an entry of {LIST_KEY} with "
        "_target_: rlcore.agent_loop.OpenAIAgentLoop, and choose the entry's name"
    )


def _try_host(host: str) -> None:
    try:
        [(family, kind, protocol, _, address), *_] = socket.getaddrinfo(
            host, 0, type=socket.SOCK_STREAM
        )
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError as error:
        raise ConfigError(
            f"{HOST_KEY}={host} is no address of this machine that can be listened on: {error}"
        ) from error


def _proxy_notices(host: str) -> list[str]:
    proxy = urllib.request.getproxies().get("http")
    if proxy is None or urllib.request.proxy_bypass(host):
        return []
    return [
        f"HTTP_PROXY is set and NO_PROXY does not name {host}: clients that heed them do not reach "
        "the endpoint, and show its token to the proxy"
    ]


def _quiet(name: str) -> None:
    """Log warnings of a library only, unless the user has set its level."""
    library = logging.getLogger(name)
    if library.level == logging.NOTSET:
        library.setLevel(logging.WARNING)


def _put_reward(output: AgentLoopOutput, result: object) -> None:
    if result is None:
        return
    reward = check_result(result)
    output.reward_score = reward.score
    output.extra_fields["reward_extra_info"] = reward.extra
