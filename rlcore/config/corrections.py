"""verl's words for rollout correction, read: thresholds, options and what calls they mean."""

import re
from dataclasses import dataclass
from typing import Any

from rlcore.config.run import RunConfig

OPTIONS: tuple[str, ...] = (
    "token_k1", "token_k2", "token_k3",
    "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
    "seq_mean_k1", "seq_mean_k2", "seq_mean_k3",
    "seq_max_k1", "seq_max_k2", "seq_max_k3",
)  # fmt: skip
"""What `rollout_rs` may list."""

_RANGE = re.compile(r"(?P<lo>[0-9.]+)_(?P<hi>[0-9.]+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """A threshold, read."""

    lower: float | None
    upper: float


def read_threshold(text: float | str) -> Bounds:
    """Return what a number or `"lo_hi"` means.

    Raises:
        ValueError: it is neither, or the bounds are not 0 < lo < hi.
    """
    if isinstance(text, str) and "_" in text:  # Python itself would read "1_2" as 12
        found = _RANGE.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r} is neither a number nor lo_hi")
        lower, upper = float(found["lo"]), float(found["hi"])
        if not 0 < lower < upper:
            raise ValueError(f"{text!r} must have 0 < lo < hi")
        return Bounds(lower=lower, upper=upper)
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"{text!r} is neither a number nor lo_hi") from None
    if number <= 0:
        raise ValueError(f"{text!r} must be above 0")
    return Bounds(lower=None, upper=number)


def split_options(text: str | None) -> tuple[str, ...]:
    """Return the options of `rollout_rs`."""
    return tuple(part.strip() for part in text.split(",")) if text else ()


def importance_weights(config: RunConfig) -> dict[str, Any] | None:
    """Return level, mode and bounds of `rollout_is_weights`; None where no weight is asked for."""
    correction = config.algorithm.rollout_correction
    if correction.rollout_is is None:
        return None
    bounds = read_threshold(correction.rollout_is_threshold)
    return {
        "level": correction.rollout_is,
        "mode": "truncate" if bounds.lower is None else "mask",
        "upper": bounds.upper,
        "lower": bounds.lower,
    }


def rejections(config: RunConfig) -> tuple[dict[str, Any], ...]:
    """Return stat, level and bounds of each `rejection_mask` that is asked for."""
    correction = config.algorithm.rollout_correction
    options = split_options(correction.rollout_rs)
    thresholds = split_thresholds(correction.rollout_rs_threshold, len(options))
    calls: list[dict[str, Any]] = []
    for option, text in zip(options, thresholds, strict=True):
        level, _, stat = option.rpartition("_")
        bounds = read_threshold(text)
        lower = bounds.lower
        if stat == "k1" and lower is None:
            lower = 1 / bounds.upper
        calls.append(
            {
                "stat": "ratio" if stat == "k1" else stat,
                "level": level,
                "lower": lower,
                "upper": bounds.upper,
            }
        )
    return tuple(calls)


def split_thresholds(text: float | str | None, count: int) -> tuple[float | str, ...]:
    """Return one threshold per option: a lone one holds for all.

    Raises:
        ValueError: there are none, or not as many as options.
    """
    if text is None:
        if count:
            raise ValueError("nothing is given")
        return ()
    parts = [part.strip() for part in text.split(",")] if isinstance(text, str) else [text]
    if len(parts) == 1:
        return tuple(parts * count)
    if len(parts) != count:
        raise ValueError(f"{len(parts)} thresholds for {count} options")
    return tuple(parts)


def inverted_k1(options: str, thresholds: str) -> str:
    """Return thresholds with the `lo_hi` of k1 options turned to 1/hi and 1/lo.

    What cannot be read is left as it is: the rules have their say about it.
    """
    names = split_options(options)
    try:
        parts = split_thresholds(thresholds, len(names))
        bounds = [read_threshold(part) for part in parts]
    except ValueError:
        return thresholds
    turned = [
        f"{1 / found.upper:.9g}_{1 / found.lower:.9g}"
        if name.endswith("_k1") and found.lower is not None
        else str(part)
        for name, part, found in zip(names, parts, bounds, strict=True)
    ]
    return thresholds if turned == [str(part) for part in parts] else ",".join(turned)
