"""The registry of advantage estimators under verl's names, and how the trainer calls them.

Legend: B rows (trajectories), T response positions, K rewards.

Every entry is called as `estimator(inputs, **settings) -> (advantages, returns)`, both [B, T] and 0
where the mask is 0. `inputs` is what the batch holds, `settings` are keyword arguments of the pure
function of the same method; an entry declares which of both it wants (`needs`, `reads`), so that a
trainer fetches and a configuration offers nothing in vain. Estimators of one number per row return
their advantages as returns too (verl does).

One of your own, in a file of `trainer.user_modules`:

    @register_adv_est("centred", reads=("singleton",))
    def centred(inputs: AdvantageInputs, singleton: str = "zero") -> tuple[Tensor, Tensor]:
        advantages = dr_grpo(inputs.scores, inputs.groups, inputs.mask, singleton)
        return advantages, advantages
"""

import functools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jaxtyping import Float, Shaped
from torch import Tensor

from rlcore.algorithms.advantages import AlphaMode, Singleton, StdLevel, opo
from rlcore.algorithms.batch_advantages import BatchNorm, gdpo, whiten_tokens
from rlcore.algorithms.returns import gae, reinforce_pp, remax
from rlcore.algorithms.sessions import SessionEstimator, multi_trajectory
from rlcore.registry import Registry

Advantages = tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]
"""Advantages and returns."""

Need = Literal["values", "baselines", "score_matrix", "single_output"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageInputs:
    """What an estimator may see of a batch."""

    mask: Shaped[Tensor, "B T"]
    """Original response mask: rejection by rollout correction comes later, in the loss."""
    token_rewards: Float[Tensor, "B T"]
    """Rewards per token, after a KL penalty if there is one."""
    scores: Float[Tensor, " B"]
    """Outcome of every row; NaN = unscorable."""
    groups: Sequence[Hashable]
    """Prompt (uid) of every row."""
    sessions: Sequence[Hashable]
    """Attempt at that prompt which the row belongs to."""
    out_index: Sequence[int]
    """Number of the row within its session: the last one's score counts."""
    values: Float[Tensor, "B T"] | None = None
    """The critic's values (need "values")."""
    baselines: Float[Tensor, " B"] | None = None
    """Score of the greedy response to the row's prompt (need "baselines")."""
    score_matrix: Float[Tensor, "B K"] | None = None
    """Several rewards per row (need "score_matrix")."""


class Estimator:
    """A registered estimator: a function and what it wants.

    Attributes:
        needs: Fields of AdvantageInputs that must not be None; "single_output": sessions of
            several rows are refused.
        reads: Names of its settings.
    """

    def __init__(
        self,
        compute: Callable[..., Advantages],
        *,
        needs: Iterable[Need] = (),
        reads: Iterable[str] = (),
    ) -> None:
        functools.update_wrapper(self, compute)
        self._compute = compute
        self.needs: frozenset[Need] = frozenset(needs)
        self.reads = frozenset(reads)

    def __call__(self, inputs: AdvantageInputs, **settings: Any) -> Advantages:
        """Return advantages and returns.

        Raises:
            ValueError: a need is not met, or the numbers are not fit; says which.
        """
        for need in sorted(self.needs - {"single_output"}):
            if getattr(inputs, need) is None:
                raise ValueError(f"this advantage estimator needs {need}, which the batch lacks")
        if "single_output" in self.needs:
            rows = Counter(zip(inputs.groups, inputs.sessions, strict=True))
            several = [session for session, count in rows.items() if count > 1]
            if several:
                raise ValueError(
                    f"this advantage estimator takes one output per session; session "
                    f"{several[0][1]!r} of prompt {several[0][0]!r} has {rows[several[0]]}"
                )
        return self._compute(inputs, **settings)


ADV_ESTIMATORS: Registry[Estimator] = Registry("advantage estimator")


def register_adv_est(
    *names: str, needs: Iterable[Need] = (), reads: Iterable[str] = ()
) -> Callable[[Callable[..., Advantages]], Callable[..., Advantages]]:
    """Register a function as advantage estimator under one or more names (verl's decorator).

    Args:
        *names: The name and its aliases.
        needs: See Estimator.
        reads: Names of the keyword arguments that the configuration gives.

    Raises:
        ConfigError: a name belongs to another function.
    """
    needed, read = tuple(needs), tuple(reads)

    def add(compute: Callable[..., Advantages]) -> Callable[..., Advantages]:
        estimator = Estimator(compute, needs=needed, reads=read)
        for name in names:
            ADV_ESTIMATORS.register(name)(estimator)
        return compute

    return add


def _by_session(inputs: AdvantageInputs, estimator: SessionEstimator, **kw: Any) -> Advantages:
    advantages = multi_trajectory(
        inputs.scores,
        inputs.groups,
        inputs.sessions,
        inputs.out_index,
        inputs.mask,
        estimator,
        **kw,
    )
    return advantages, advantages


@register_adv_est("grpo", "grpo_vectorized", reads=("norm_by_std", "singleton"))
def _grpo(
    inputs: AdvantageInputs,
    norm_by_std: bool = True,
    singleton: Singleton = "zero",
    std_level: StdLevel = "group",
) -> Advantages:
    return _by_session(
        inputs, "grpo", norm_by_std=norm_by_std, singleton=singleton, std_level=std_level
    )


@register_adv_est("dr_grpo", reads=("singleton",))
def _dr_grpo(inputs: AdvantageInputs, singleton: Singleton = "zero") -> Advantages:
    return _by_session(inputs, "dr_grpo", singleton=singleton)


@register_adv_est("rloo", "rloo_vectorized", reads=("singleton",))
def _rloo(inputs: AdvantageInputs, singleton: Singleton = "zero") -> Advantages:
    return _by_session(inputs, "rloo", singleton=singleton)


@register_adv_est("grpo_passk", reads=("norm_by_std",))
def _grpo_passk(inputs: AdvantageInputs, norm_by_std: bool = True) -> Advantages:
    return _by_session(inputs, "grpo_passk", norm_by_std=norm_by_std)


@register_adv_est("gpg", reads=("alpha_mode", "singleton"))
def _gpg(
    inputs: AdvantageInputs,
    alpha_mode: AlphaMode = "valid_groups",
    singleton: Singleton = "zero",
) -> Advantages:
    return _by_session(inputs, "gpg", alpha_mode=alpha_mode, singleton=singleton)


@register_adv_est("opo", needs=("single_output",), reads=("singleton",))
def _opo(inputs: AdvantageInputs, singleton: Singleton = "zero") -> Advantages:
    advantages = opo(inputs.scores, inputs.groups, inputs.mask, singleton=singleton)
    return advantages, advantages


@register_adv_est(
    "reinforce_plus_plus_baseline", "reinforce_pp_baseline", reads=("singleton", "whiten")
)
def _reinforce_pp_baseline(
    inputs: AdvantageInputs, singleton: Singleton = "zero", whiten: bool = True
) -> Advantages:
    centred, _ = _by_session(inputs, "dr_grpo", singleton=singleton)
    advantages = whiten_tokens(centred, inputs.scores, inputs.mask) if whiten else centred
    return advantages, advantages


@register_adv_est(
    "gdpo",
    needs=("score_matrix", "single_output"),
    reads=("weights", "norm_by_std", "batch_norm", "singleton"),
)
def _gdpo(
    inputs: AdvantageInputs,
    weights: Sequence[float] | None = None,
    norm_by_std: bool = True,
    batch_norm: BatchNorm = "sample",
    singleton: Singleton = "zero",
) -> Advantages:
    assert inputs.score_matrix is not None
    advantages = gdpo(
        inputs.score_matrix,
        inputs.groups,
        inputs.mask,
        weights,
        norm_by_std=norm_by_std,
        batch_norm=batch_norm,
        singleton=singleton,
    )
    return advantages, advantages


def _gae(
    inputs: AdvantageInputs, gamma: float = 1.0, lam: float = 1.0, whiten: bool = True
) -> Advantages:
    assert inputs.values is not None
    return gae(inputs.token_rewards, inputs.values, inputs.mask, gamma, lam, whiten)


def _remax(inputs: AdvantageInputs) -> Advantages:
    assert inputs.baselines is not None
    return remax(inputs.token_rewards, inputs.baselines, inputs.mask)


@register_adv_est("reinforce_plus_plus", "reinforce_pp", reads=("gamma", "whiten"))
def _reinforce_pp(inputs: AdvantageInputs, gamma: float = 1.0, whiten: bool = True) -> Advantages:
    return reinforce_pp(inputs.token_rewards, inputs.mask, gamma, whiten)


# Not registered here: the phases that compute what these need register them under verl's names,
# `ADV_ESTIMATORS.register("gae")(GAE)`, so that a name that can be chosen can be trained with.
GAE = Estimator(_gae, needs=("values",), reads=("gamma", "lam", "whiten"))
"""For a trainer with a critic, whose values of the batch are in the column `values`."""

REMAX = Estimator(_remax, needs=("baselines",))
"""For a trainer that also scores one greedy response per prompt."""
