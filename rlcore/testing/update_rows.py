"""Random rows for an update of the policy: lengths given, tokens and advantages drawn."""

from collections.abc import Sequence

import torch

from rlcore.training.batches import Rows


def random_rows(
    prompt_lengths: Sequence[int],
    response_lengths: Sequence[int],
    *,
    per_group: int,
    vocabulary: int = 1000,
    seed: int = 0,
) -> Rows:
    """Return the columns that `PolicyUpdater` reads.

    Args:
        prompt_lengths: Tokens of each row's prompt; rows of a group must have the same.
        response_lengths: Tokens of each row's response.
        per_group: Rows in a line that share a prompt.
        vocabulary: Tokens are drawn from 1 up to this.
        seed: Of all draws.
    """
    generator = torch.Generator().manual_seed(seed)
    rows: Rows = {
        name: []
        for name in ("prompts", "responses", "response_mask", "old_log_probs", "advantages")
    }
    prompt = torch.empty(0, dtype=torch.long)
    for index, (before, after) in enumerate(zip(prompt_lengths, response_lengths, strict=True)):
        if index % per_group == 0:
            prompt = torch.randint(1, vocabulary, (before,), generator=generator)
        rows["prompts"].append(prompt)
        rows["responses"].append(torch.randint(1, vocabulary, (after,), generator=generator))
        rows["response_mask"].append(torch.ones(after, dtype=torch.long))
        rows["old_log_probs"].append(torch.full((after,), -7.0))
        rows["advantages"].append(torch.randn(1, generator=generator).expand(after).clone())
    return rows
