"""From one score per trajectory to token rewards.

Legend: B rows (trajectories), T response positions.
"""

import torch
from jaxtyping import Float, Shaped
from torch import Tensor


def place_outcome_reward(
    scores: Float[Tensor, " B"], mask: Shaped[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """Return token rewards that hold each row's score at its last valid position, else 0.

    The last valid position, not the last attended one: a response may end in tool tokens, whose
    rewards every estimator ignores. A row without a valid token holds nothing.
    """
    valid = mask.bool()
    num_after = valid.flip(-1).cumsum(-1).flip(-1)
    is_last = valid & (num_after == 1)
    zero = torch.zeros((), dtype=scores.dtype, device=scores.device)
    return torch.where(is_last, scores[:, None], zero)
