import pytest
import torch

from rlcore.errors import FencedError
from rlcore.training.start_weights import StartWeights
from rlcore.types import CallKey


def key(step, inner):
    return CallKey(run_id="r", attempt=1, global_step=step, inner_step=inner)


def test_later_inner_steps_see_the_weights_of_the_steps_start():
    model = torch.nn.Linear(1, 1, bias=False)
    start = StartWeights()

    def set_to(value):
        with torch.no_grad():
            model.weight.fill_(value)

    set_to(1.0)
    with start.of_step(key(1, 0), model, is_needed=True):
        assert model.weight.item() == 1.0
    set_to(2.0)
    with start.of_step(key(1, 1), model, is_needed=True):
        assert model.weight.item() == 1.0
    assert model.weight.item() == 2.0
    with pytest.raises(RuntimeError), start.of_step(key(1, 1), model, is_needed=True):
        raise RuntimeError("the forward pass failed")
    assert model.weight.item() == 2.0
    with pytest.raises(FencedError, match="step 1\\); the step has to begin anew"):
        start.of_step(key(2, 1), model, is_needed=True).__enter__()
    with start.of_step(key(2, 0), model, is_needed=True):
        pass
    set_to(3.0)
    with start.of_step(key(2, 1), model, is_needed=True):
        assert model.weight.item() == 2.0
    with start.of_step(key(9, 1), model, is_needed=False):
        assert model.weight.item() == 3.0
