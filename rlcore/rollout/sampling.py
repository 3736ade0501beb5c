"""Sampling of one token per slot: random numbers and inverse CDF.

Legend: S slots, V vocabulary. A request's random numbers depend on its seed and on the position of
the token in its turn only, never on other requests or on when it runs: number `position` of stream
`seed` is a hash of the two (the finaliser of SplitMix64, applied twice), computed for all slots at
once. Every operation on logits works row by row, so a row's token and log-prob do not depend on the
other rows.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_BLOCK = 256
"""Probabilities are summed in blocks of this size: one pass over V instead of a running sum."""


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def uniform(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Return number `positions[i]` of stream `seeds[i]`, in [0, 1).

    The seed is mixed before the position joins it: streams of neighbouring seeds share no numbers.
    """
    counter = _mix(seeds + _GOLDEN) + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    return (_mix(_mix(counter)) >> np.uint64(11)).astype(np.float64) * np.float64(2.0**-53)


class SlotSampler:
    """Chooses a token for each of S rows of logits; reuses its buffers.

    Fresh pages for [S, V] float32 numbers cost several times what the arithmetic does.
    """

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        num_blocks = -(-vocab_size // _BLOCK)
        self._vocab_size = vocab_size
        # The columns past V stay at zero probability.
        self._padded = torch.zeros(num_slots, num_blocks * _BLOCK, dtype=torch.float32)
        self._rows = torch.arange(num_slots)

    def sample(
        self,
        logits: Tensor,
        temperature: npt.NDArray[np.float32],
        do_sample: npt.NDArray[np.bool_],
        uniforms: npt.NDArray[np.float64],
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Return token and log-prob per row.

        Args:
            logits: [S, V], any floating point type.
            temperature: [S], above 0.
            do_sample: [S], False: the most likely token.
            uniforms: [S], in [0, 1).
        """
        scores = self._padded[:, : self._vocab_size]
        scores.copy_(logits)
        if np.any(temperature != 1.0):
            scores.div_(torch.from_numpy(temperature)[:, None])
        scores.sub_(scores.amax(dim=-1, keepdim=True))
        best = None if do_sample.all() else scores.argmax(dim=-1)
        weights = scores.exp_()
        if self._padded.shape[1] == _BLOCK:
            cumulative = self._padded.cumsum(dim=-1, dtype=torch.float64)
            tokens = _first_above(cumulative, torch.from_numpy(uniforms) * cumulative[:, -1])
        else:
            sums = self._padded.view(len(self._rows), -1, _BLOCK).sum(dim=-1)
            cumulative = sums.cumsum(dim=-1, dtype=torch.float64)
            tokens = self._inverse_cdf(cumulative, torch.from_numpy(uniforms))
        if best is not None:
            tokens = torch.where(torch.from_numpy(do_sample), tokens, best)
        chosen = weights[self._rows, tokens].double()
        log_probs = (chosen / cumulative[:, -1]).log_().float()
        return tokens.numpy(), log_probs.numpy()

    def _inverse_cdf(self, cumulative: Tensor, uniforms: Tensor) -> Tensor:
        """First token whose cumulative probability exceeds the uniform number: block, then place.

        A token of zero probability is never chosen, whatever the rounding of the sums.
        """
        target = uniforms * cumulative[:, -1]
        block = _first_above(cumulative, target)
        before = cumulative.gather(1, (block - 1).clamp_(min=0)[:, None])[:, 0]
        target -= before.masked_fill_(block == 0, 0.0)
        inside = self._padded.view(len(self._rows), -1, _BLOCK)[self._rows, block]
        place = _first_above(inside.cumsum(dim=-1, dtype=torch.float64), target)
        return block.mul_(_BLOCK).add_(place)


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """Per row the first column above `target`, the latter cut to just below the row's total."""
    total = cumulative[:, -1]
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    return (cumulative <= target[:, None]).sum(dim=-1)
