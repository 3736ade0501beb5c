"""Which runs may use the queue of a Ray cluster: one, unless all of them share."""

from dataclasses import dataclass

from rlcore.errors import DeviceLockError, FencedError
from rlcore.types import CallKey


@dataclass(frozen=True, kw_only=True, slots=True)
class Tenant:
    """A run that uses the queue."""

    run_id: str
    attempt: int
    shared: bool


class Tenants:
    """Admits runs and fences their older attempts."""

    def __init__(self) -> None:
        self._held: dict[str, Tenant] = {}

    def acquire(self, tenant: Tenant) -> None:
        """Let a run in; a higher attempt of a run takes over from the lower.

        Raises:
            FencedError: a higher attempt of the run has been seen.
            DeviceLockError: another run uses the queue; names it.
        """
        known = self._held.get(tenant.run_id)
        if known is not None and tenant.attempt < known.attempt:
            raise FencedError(
                f"run {tenant.run_id} attempt {tenant.attempt} was refused by the queue: attempt "
                f"{known.attempt} has begun"
            )
        others = [other for name, other in self._held.items() if name != tenant.run_id]
        if others and not (tenant.shared and all(other.shared for other in others)):
            names = ", ".join(f"{other.run_id} (attempt {other.attempt})" for other in others)
            raise DeviceLockError(
                f"the queue of this Ray cluster is used by run {names}: wait for its end, use "
                "another cluster, or switch sharing on in both runs"
            )
        self._held[tenant.run_id] = tenant

    def release(self, run_id: str, attempt: int) -> list[str]:
        """Let a run out; a repeat is fine. Return the runs that remain.

        Raises:
            FencedError: a higher attempt of the run has been seen.
        """
        known = self._held.get(run_id)
        if known is not None and attempt < known.attempt:
            raise FencedError(
                f"run {run_id} attempt {attempt} may not release the queue: attempt "
                f"{known.attempt} has begun"
            )
        self._held.pop(run_id, None)
        return sorted(self._held)

    def evict(self, run_id: str) -> None:
        """Let a run out that is known to be dead."""
        self._held.pop(run_id, None)

    def admit(self, caller: CallKey | int, partition_id: str) -> None:
        """Let a write to a partition pass.

        Args:
            caller: A key, or the attempt alone (workers have no step).
            partition_id: `{run_id}/...`.

        Raises:
            FencedError: an older attempt, or a run that does not hold the queue.
        """
        run_id = partition_id.split("/")[0]
        tenant = self._held.get(run_id)
        if tenant is None:
            raise FencedError(f"run {run_id} does not hold the queue; it is held by {self.runs()}")
        attempt = caller if isinstance(caller, int) else caller.attempt
        if not isinstance(caller, int) and caller.run_id != run_id:
            raise FencedError(f"{caller} was refused: partition {partition_id} is of another run")
        if attempt != tenant.attempt:
            raise FencedError(
                f"run {run_id} attempt {attempt} was refused by the queue: attempt "
                f"{tenant.attempt} holds it"
            )

    def runs(self) -> list[str]:
        """Return the ids of the runs that use the queue."""
        return sorted(self._held)
