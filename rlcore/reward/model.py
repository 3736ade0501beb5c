"""Rewards by a model: the score of a discriminative one, and what a judge's function is given.

Runs in a scoring process and asks the run's reward model over HTTP (rlcore/reward/model_server.py).
"""

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from rlcore.config import RunConfig
from rlcore.errors import ActorUnavailableError, ConfigError, DataError
from rlcore.reward.function import Reward, check_result


def is_discriminative(config: RunConfig) -> bool:
    """Tell whether the reward model itself scores: no function of the user's asks it."""
    reward = config.reward
    has_function = bool(reward.functions) or reward.custom_reward_function.path is not None
    return reward.reward_model.enable and not has_function


def check_address(config: RunConfig, address: str | None) -> None:
    """Check that the run's reward model can be asked here.

    Raises:
        ConfigError: it is enabled, and nobody has started it.
    """
    if config.reward.reward_model.enable and address is None:
        raise ConfigError(
            "reward.reward_model.enable=true: the reward model runs in a training run only; set it "
            "to false here, with a reward function that does not ask it"
        )


class ModelReward:
    """Scores by the run's discriminative reward model."""

    def __init__(self, address: str, timeout_s: float) -> None:
        self._url = f"http://{address}/classify"
        self._timeout_s = timeout_s

    def score(self, messages: Sequence[Mapping[str, Any]], response: str) -> Reward:
        """Return the model's last output for the conversation with the response at its end.

        Raises:
            ActorUnavailableError: the reward model is not there.
            DataError: it refuses the conversation; says why.
        """
        conversation = [*messages, {"role": "assistant", "content": response}]
        answer = self._post({"messages": conversation})
        return check_result(answer["data"][-1]["probs"][-1])

    def _post(self, body: Mapping[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            self._url, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            reason = error.read().decode("utf-8", "replace")[:1000]
            if error.code < 500:
                raise DataError(f"the reward model refuses the response: {reason}") from error
            raise ActorUnavailableError(
                f"the reward model at {self._url} answered {error.code}: {reason}"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise ActorUnavailableError(
                f"the reward model at {self._url} is not there: {type(error).__name__}: {error}"
            ) from error
