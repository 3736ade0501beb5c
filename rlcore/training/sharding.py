"""FSDP2: parameters, gradients and optimizer state divided among the ranks.

Each decoder layer is a unit whose parameters are gathered when it computes; what is left
(embedding, norm, head) belongs to the root. Gradients are summed over the ranks, not averaged: each
rank's loss is its part of the whole optimizer step's, divided by the totals of all ranks.
"""

from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from rlcore.training.ranks import Ranks


def shard(net: nn.Module, layers: list[nn.Module], ranks: Ranks) -> None:
    """Divide `net`'s parameters among the ranks, in place; one rank keeps them whole.

    Args:
        net: The root, whose forward pass is what is called.
        layers: Its decoder layers.
        ranks: Who takes part.
    """
    if ranks.size == 1:
        return
    mesh = init_device_mesh(ranks.device, (ranks.size,))
    for module in (*layers, net):
        # The root too: what a forward pass without backward leaves must be shards again.
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    for module in (*layers, net):
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def sum_gradients_at_end(net: nn.Module, *, is_end: bool) -> None:
    """Let the next backward pass sum the gradients of all ranks, or only add to its own."""
    if isinstance(net, FSDPModule):
        net.set_requires_gradient_sync(is_end)


def whole(tensor: Tensor) -> Tensor:
    """Return the tensor of all ranks' shards; every rank must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
