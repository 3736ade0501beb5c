"""From the configuration to the policy loss: its name, its settings and what corrects it.

Rollout correction has two places. With old log-probs of the trainer's it is made once for the batch
(compute_advantage writes weights and a mask). In bypass mode the only other policy is the one being
trained, so the loss makes it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlcore.algorithms import POLICY_LOSSES
from rlcore.config import RunConfig
from rlcore.config.arguments import arguments, loss_settings, weight_settings
from rlcore.config.corrections import rejections


@dataclass(frozen=True, kw_only=True, slots=True)
class LossChoice:
    """What the training worker is to compute."""

    name: str
    """In POLICY_LOSSES."""
    settings: dict[str, Any]
    has_is_weights: bool
    """The batch has importance weights."""
    has_train_mask: bool
    """The batch has a mask without what was rejected."""
    rejections: tuple[Mapping[str, Any], ...]
    """To be made in the loss."""


def loss_choice(config: RunConfig) -> LossChoice:
    """Return the loss that a configuration asks for.

    Raises:
        ConfigError: it is not registered.
    """
    correction = config.algorithm.rollout_correction
    name = config.actor_rollout_ref.actor.policy_loss.loss_mode
    settings = loss_settings(config, name, POLICY_LOSSES.get(name).reads)
    weights, rejected = weight_settings(config), rejections(config)
    is_bypass = correction.bypass_mode
    if is_bypass and (correction.loss_type == "reinforce" or name in ("vanilla", "bypass_mode")):
        name = "bypass_mode"
        settings = {
            **arguments(config, "ppo_loss"),
            "loss_type": correction.loss_type,
            "weights": weights,
        }
    return LossChoice(
        name=name,
        settings=settings,
        has_is_weights=not is_bypass and weights is not None,
        has_train_mask=not is_bypass and bool(rejected),
        rejections=rejected if is_bypass else (),
    )
