"""Rules about hosts and devices: pools that would overlap are found before a cluster is started."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from rlcore.config.problems import Problem
from rlcore.config.run import RunConfig

_DEVICES: Final = Path("/dev")


def count_gpus(devices: Path = _DEVICES) -> int:
    """Return the NVIDIA devices of this host, without loading a driver."""
    return sum(1 for path in devices.glob("nvidia[0-9]*") if path.name[6:].isdigit())


def pools(config: RunConfig) -> dict[str, tuple[int, int]]:
    """Return hosts and devices per host of every pool that a run asks for."""
    rollout, model = config.actor_rollout_ref.rollout, config.reward.reward_model
    found = {"trainer": (config.trainer.nnodes, config.trainer.n_gpus_per_node)}
    if config.trainer.v1.trainer_mode == "separate_async":
        found["actor_rollout_ref.rollout"] = (rollout.nnodes, rollout.n_gpus_per_node)
    if model.enable and model.enable_resource_pool:
        found["reward.reward_model"] = (model.nnodes, model.n_gpus_per_node)
    return found


def pools_fit_the_host(config: RunConfig, num_gpus: int | None = None) -> Iterator[Problem]:
    """On a local cluster all pools are on this host, each with devices of its own.

    Args:
        config: What is asked for.
        num_gpus: Devices of this host; None: counted.
    """
    if config.ray.address is not None:
        return
    asked = pools(config)
    for section, (hosts, _) in asked.items():
        if hosts > 1:
            yield Problem(
                path=f"{section}.nnodes",
                value=hosts,
                reason="ray.address=null starts a cluster on this host alone",
                fix="set it to 1, or ray.address to a cluster of several hosts",
                involves=("ray.address",),
            )
    if config.trainer.device != "cuda":
        return
    present = count_gpus() if num_gpus is None else num_gpus
    if present == 0:
        yield Problem(
            path="trainer.device",
            value="cuda",
            reason="this host has no NVIDIA device",
            fix="set it to cpu, or ray.address to a cluster with GPUs",
            involves=("ray.address",),
        )
        return
    total = sum(devices for _, devices in asked.values())
    if total > present:
        sums = " + ".join(f"{name}.n_gpus_per_node {n}" for name, (_, n) in asked.items())
        yield Problem(
            path="trainer.n_gpus_per_node",
            value=config.trainer.n_gpus_per_node,
            reason=f"the devices would overlap: {sums} = {total}, this host has {present}",
            fix="lower them, or set ray.address to a cluster with more",
            involves=(*(f"{name}.n_gpus_per_node" for name in asked), "trainer.device"),
        )


RULES = (pools_fit_the_host,)
