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


def stream_seed(seed: int, position: int) -> int:
    """Return the seed of a stream that begins at `position`, for generators that cannot skip.

    The stream of position 0 is `seed` itself.
    """
    if position == 0:
        return seed
    counter = _mix(np.array([seed], dtype=np.uint64)) + np.array([position], np.uint64) * _GOLDEN
    return int(_mix(counter)[0])


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
        top_p: npt.NDArray[np.float32],
        top_k: npt.NDArray[np.int64],
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Return token and log-prob per row; log-probs are of the distribution that is not cut.

        Args:
            logits: [S, V], any floating point type.
            temperature: [S], above 0.
            do_sample: [S], False: the most likely token.
            uniforms: [S], in [0, 1).
            top_p: [S], 0 < p <= 1: the fewest most likely tokens that hold this share.
            top_k: [S], as many most likely tokens; 0: all.
        """
        scores = self._padded[:, : self._vocab_size]
        scores.copy_(logits)
        if np.any(temperature != 1.0):
            scores.div_(torch.from_numpy(temperature)[:, None])
        scores.sub_(scores.amax(dim=-1, keepdim=True))
        best = None if do_sample.all() else scores.argmax(dim=-1)
        weights = scores.exp_()
        cumulative = self._cumulative()
        total = cumulative[:, -1]
        cut = np.flatnonzero(do_sample & ((top_p < 1) | (top_k > 0)))
        if len(cut):
            rows = torch.from_numpy(cut)
            weights[rows] = _most_likely(
                weights[rows], torch.from_numpy(top_p[cut]), torch.from_numpy(top_k[cut])
            )
            cumulative = self._cumulative()
        if self._padded.shape[1] == _BLOCK:
            tokens = _first_above(cumulative, torch.from_numpy(uniforms) * cumulative[:, -1])
        else:
            tokens = self._inverse_cdf(cumulative, torch.from_numpy(uniforms))
        if best is not None:
            tokens = torch.where(torch.from_numpy(do_sample), tokens, best)
        chosen = weights[self._rows, tokens].double()
        log_probs = (chosen / total).log_().float()
        return tokens.numpy(), log_probs.numpy()

    def _cumulative(self) -> Tensor:
        """Running sums of the probabilities, [S, V], or of their blocks where V is long."""
        if self._padded.shape[1] == _BLOCK:
            return self._padded.cumsum(dim=-1, dtype=torch.float64)
        sums = self._padded.view(len(self._rows), -1, _BLOCK).sum(dim=-1)
        return sums.cumsum(dim=-1, dtype=torch.float64)

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


def _most_likely(weights: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """Return [R, V] weights with 0 where a token is not among the most likely ones.

    First the k most likely are kept, then of those the fewest that hold the share p: the token that
    crosses it belongs to them (Holtzman et al. 2020, arXiv:1904.09751).
    """
    ordered, places = weights.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(weights.shape[1])
    limit = torch.where(top_k > 0, top_k, weights.shape[1])[:, None]
    ordered = ordered.masked_fill(ranks >= limit, 0.0)
    before = ordered.cumsum(dim=-1, dtype=torch.float64) - ordered
    share = top_p.double()[:, None] * ordered.sum(dim=-1, keepdim=True, dtype=torch.float64)
    kept = ordered.masked_fill((before >= share) & (top_p < 1)[:, None], 0.0)
    return torch.zeros_like(weights).scatter_(1, places, kept)


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """Per row the first column above `target`, the latter cut to just below the row's total."""
    total = cumulative[:, -1]
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    return (cumulative <= target[:, None]).sum(dim=-1)
