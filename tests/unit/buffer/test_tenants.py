import pytest

from rlcore.buffer.tenants import Tenant, Tenants
from rlcore.errors import DeviceLockError, FencedError
from rlcore.types import CallKey


def tenant(run_id, attempt=1, *, shared=False):
    return Tenant(run_id=run_id, attempt=attempt, shared=shared)


def test_a_second_run_is_refused_with_the_name_of_the_first():
    tenants = Tenants()
    tenants.acquire(tenant("run-1", 2))
    with pytest.raises(DeviceLockError, match=r"run-1 \(attempt 2\)"):
        tenants.acquire(tenant("run-2"))
    # Sharing takes two.
    with pytest.raises(DeviceLockError):
        tenants.acquire(tenant("run-2", shared=True))
    assert tenants.release("run-1", 2) == []
    tenants.acquire(tenant("run-2"))
    assert tenants.runs() == ["run-2"]


def test_runs_that_share_are_let_in():
    tenants = Tenants()
    tenants.acquire(tenant("run-1", shared=True))
    tenants.acquire(tenant("run-2", shared=True))
    assert tenants.release("run-1", 1) == ["run-2"]
    tenants.evict("run-2")
    assert tenants.runs() == []


def test_a_higher_attempt_takes_over_and_the_lower_is_refused():
    tenants = Tenants()
    tenants.acquire(tenant("run-1", 1))
    tenants.acquire(tenant("run-1", 2))
    tenants.admit(2, "run-1/train")
    key = CallKey(run_id="run-1", attempt=2, global_step=1)
    tenants.admit(key, "run-1/val")
    for call in (
        lambda: tenants.acquire(tenant("run-1", 1)),
        lambda: tenants.release("run-1", 1),
        lambda: tenants.admit(1, "run-1/train"),
        lambda: tenants.admit(3, "run-1/train"),
        lambda: tenants.admit(2, "run-2/train"),
    ):
        with pytest.raises(FencedError):
            call()
    tenants.acquire(tenant("run-1", 2))
    assert tenants.runs() == ["run-1"]
