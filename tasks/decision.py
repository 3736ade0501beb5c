"""What a person says to a candidate: the form of the paused promotion."""

from typing import Literal

from prefect.input import RunInput


class Decision(RunInput):
    """Approve or reject, and why."""

    decision: Literal["approve", "reject"] = "reject"
    """There is no reject button in Prefect's UI."""
    reason: str
    """Is kept with the promotion."""
