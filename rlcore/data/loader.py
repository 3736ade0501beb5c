"""The stateful loader: the prompts of a run by position; its whole state is a number and JSON."""

from collections import defaultdict
from typing import Any

from rlcore.config import RunConfig
from rlcore.data.dataset import PromptDataset, index_of_uid, make_specs
from rlcore.data.order import PromptOrder, weighted_plan
from rlcore.data.samplers import PromptResult, PromptSampler, SamplerState, load_sampler
from rlcore.types import PromptSpec, SampledBatch


class PromptLoader:
    """Training prompts in the order that the configuration asks for.

    What comes at a position follows from the configuration, the data and, where a sampler learns
    from results, its state: feeding a position again, in a retry or after a resume, names the same
    prompts.
    """

    def __init__(self, config: RunConfig, dataset: PromptDataset) -> None:
        self._config = config
        self.dataset = dataset
        self._sampler = load_sampler(config, dataset)
        self._order: PromptOrder | None = None
        self._planned_by: Any = None

    @property
    def sampler(self) -> PromptSampler | None:
        """The sampler of `data.sampler`, or None."""
        return self._sampler

    def order(self, state: SamplerState | None = None) -> PromptOrder:
        """Return the order of the training prompts."""
        planned_by = None if state is None else state["epochs"]
        if self._order is None or planned_by != self._planned_by:
            self._order = self._make_order(state)
            self._planned_by = planned_by
        return self._order

    def begin(self, state: SamplerState | None, *, start: int, count: int) -> SamplerState | None:
        """Return the sampler's state for prompts `start` to `start + count - 1`."""
        if self._sampler is None:
            return None
        batch_size = self._config.data.train_batch_size
        length = len(self.dataset) // batch_size * batch_size
        last = (start + max(count, 1) - 1) // length
        return self._sampler.begin(state, range(start // length, last + 1))

    def specs(
        self,
        state: SamplerState | None,
        *,
        start: int,
        count: int,
        run_id: str,
        global_step: int,
    ) -> list[PromptSpec]:
        """Return prompts `start` to `start + count - 1`.

        Args:
            state: Of `begin` for these prompts.
            start: Position in the run, from 0.
            count: How many.
            run_id: Names the run in their uids.
            global_step: The step they are fed in.
        """
        return make_specs(
            self.dataset,
            self.order(state),
            start=start,
            count=count,
            run_id=run_id,
            partition_id=f"{run_id}/train",
            global_step=global_step,
            num_sessions=self._config.actor_rollout_ref.rollout.n,
        )

    def observe(self, state: SamplerState | None, batch: SampledBatch) -> SamplerState | None:
        """Return the sampler's state after a batch that was generated and scored."""
        if self._sampler is None:
            return None
        return self._sampler.observe(state, results_of(batch))

    def _make_order(self, state: SamplerState | None) -> PromptOrder:
        data, seed = self._config.data, self._config.data_seed
        plan = None
        if self._sampler is not None:
            plan = self._sampler.plan(state)
        elif data.train_weights is not None:
            rows = self.dataset.store.meta.rows_per_file
            plan = weighted_plan(rows, data.train_weights, shuffle=data.shuffle, seed=seed)
        return PromptOrder(
            num_rows=len(self.dataset),
            batch_size=data.train_batch_size,
            shuffle=data.shuffle,
            seed=seed,
            plan=plan,
        )


def results_of(batch: SampledBatch) -> list[PromptResult]:
    """Return how the prompts of a batch went, in the order of the batch."""
    rewards: dict[str, list[float]] = defaultdict(list)
    accuracies: dict[str, list[float]] = defaultdict(list)
    scored: set[tuple[str, int]] = set()
    for tag in batch.tags:
        session = (tag["uid"], tag["session_id"])
        if session in scored:  # another trajectory of the same session
            continue
        scored.add(session)
        reward = float(tag["reward"])
        rewards[tag["uid"]].append(reward)
        accuracy = float(tag["reward_extra"].get("acc", reward))
        accuracies[tag["uid"]].append(min(1.0, max(0.0, accuracy)))
    return [
        PromptResult(index=index_of_uid(uid), rewards=rewards[uid], accuracies=accuracies[uid])
        for uid in batch.uids
        if uid in rewards
    ]
