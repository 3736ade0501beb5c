"""The process that sends weights: it leaves nothing behind, however it starts."""

import psutil
import pytest

from rlcore.checkpoint_engine.sender import SenderProcess
from rlcore.errors import WeightTransferError


def senders() -> list[psutil.Process]:
    """This process's children that send weights, ended ones that nobody has waited for, too."""
    return [
        child
        for child in psutil.Process().children()
        if child.status() == psutil.STATUS_ZOMBIE or "sender_process" in " ".join(child.cmdline())
    ]


@pytest.mark.parametrize(
    ("backend", "start_s", "how"),
    [("gloo", 0.01, "did not answer within 0.01 s"), ("none", 60.0, "is dead")],
)
def test_a_child_that_does_not_start_is_killed(backend, start_s, how):
    before = {child.pid for child in senders()}
    with pytest.raises(WeightTransferError, match=rf"{how} \(start\)"):
        SenderProcess(backend, start_s)
    assert {child.pid for child in senders()} <= before
