"""Advantages from token rewards: GAE, ReMax, REINFORCE++.

Legend: B rows (trajectories), T response positions.

| function | advantage | paper |
|---|---|---|
| gae | sum of (gamma lam)^k (r + gamma V_next - V) | https://arxiv.org/abs/1506.02438 |
| remax | reward-to-go - score of the greedy response | https://arxiv.org/abs/2310.10505 |
| reinforce_pp | whitened discounted reward-to-go | https://arxiv.org/abs/2501.03262 |

All run over the valid tokens of a row as if the others were not there: crossing a tool span,
however long, costs no discount, no TD error and no reset (OpenRLHF and slime count tool tokens as
steps; verl sets the return to 0 there and carries values into the masked positions of its output).
"""

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from rlcore.algorithms.masked import checked, is_nonempty, masked_whiten, select


@torch.no_grad()
def gae(
    token_rewards: Float[Tensor, "B T"],
    values: Float[Tensor, "B T"],
    mask: Shaped[Tensor, "B T"],
    gamma: float = 1.0,
    lam: float = 1.0,
    whiten: bool = False,
    bootstrap_values: Float[Tensor, " B"] | None = None,
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Return generalised advantages and returns (advantage + value, before whitening).

    Args:
        token_rewards: reward of every token.
        values: the critic's value of the state before the token; for the first token, of the
            prompt.
        mask: valid tokens.
        gamma: discount per valid token.
        lam: mixes one-step (0) and whole-response (1) estimates.
        whiten: whiten the advantages over all valid tokens.
        bootstrap_values: value after the last valid token of every row, for rows cut by the length
            limit; None = 0, the response ended there.

    Raises:
        ValueError: a valid number is not finite.
    """
    rewards = checked("token reward", token_rewards, mask)
    value = checked("value", values, mask)
    last = value.new_zeros(len(value))
    if bootstrap_values is not None:
        last = checked("bootstrap value", bootstrap_values, is_nonempty(mask)).to(value.dtype)
    following = _next_valid(value, mask, last)
    deltas = rewards + gamma * following - value
    advantages = _to_go(deltas, mask, gamma * lam)
    returns = advantages + value
    return masked_whiten(advantages, mask) if whiten else advantages, returns


@torch.no_grad()
def remax(
    token_rewards: Float[Tensor, "B T"],
    baselines: Float[Tensor, " B"],
    mask: Shaped[Tensor, "B T"],
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Return reward-to-go minus the greedy response's score, and the reward-to-go.

    Args:
        token_rewards: reward of every token.
        baselines: score of the greedy response to the row's prompt.
        mask: valid tokens.

    Raises:
        ValueError: a valid number is not finite.
    """
    returns = _to_go(checked("token reward", token_rewards, mask), mask, 1.0)
    baseline = checked("baseline", baselines, is_nonempty(mask))
    return select(returns - baseline[:, None], mask), returns


@torch.no_grad()
def reinforce_pp(
    token_rewards: Float[Tensor, "B T"],
    mask: Shaped[Tensor, "B T"],
    gamma: float = 1.0,
    whiten: bool = True,
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Return the whitened discounted reward-to-go, and the same before whitening.

    Args:
        token_rewards: reward of every token.
        mask: valid tokens.
        gamma: discount per valid token.
        whiten: whiten the advantages over all valid tokens.

    Raises:
        ValueError: a valid number is not finite.
    """
    returns = _to_go(checked("token reward", token_rewards, mask), mask, gamma)
    return masked_whiten(returns, mask) if whiten else returns, returns


def _to_go(x: Tensor, mask: Tensor, factor: float) -> Tensor:
    """Return y_t = x_t + factor y_next over the valid tokens, 0 elsewhere."""
    valid = mask.bool()
    found, following = torch.zeros_like(x), x.new_zeros(len(x))
    for t in reversed(range(x.shape[-1])):
        following = torch.where(valid[:, t], x[:, t] + factor * following, following)
        found[:, t] = following
    return select(found, mask)


def _next_valid(x: Tensor, mask: Tensor, last: Tensor) -> Tensor:
    """Return at every position the value of the row's next valid one, `last` after the last."""
    width = x.shape[-1]
    position = torch.arange(width, device=x.device).expand(mask.shape)
    own = torch.where(mask.bool(), position, width)
    # The smallest valid position strictly to the right.
    right = torch.cat([own, own.new_full((len(own), 1), width)], -1)[:, 1:]
    index = right.flip(-1).cummin(-1).values.flip(-1)
    return torch.cat([x, last[:, None]], -1).gather(-1, index)
