"""One PPO update of a policy with two parameters, against numbers worked out by hand."""

import math

import pytest
import torch
from torch import nn

from rlcore.training.layout import padded_layout
from rlcore.training.update import PolicyUpdater


class Coin(nn.Module):
    """Two actions with one logit each; both start at 0, so that each has probability 1/2."""

    def __init__(self):
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(2))

    def forward(self, targets):
        logp = torch.log_softmax(self.logits, -1)
        entropy = -(logp.exp() * logp).sum()
        return logp[targets], entropy.expand(len(targets))


class ToyPolicy:
    packing = "padded"

    def __init__(self):
        self.net = Coin()

    def layout(self, prompts, responses):
        return padded_layout(prompts, responses)

    def outputs(self, layout, temperature):
        return self.net(layout.targets)


def test_one_update_by_hand(make_spec):
    policy = ToyPolicy()
    settings = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0, "agg": "token-mean"}
    spec = make_spec(weight_decay=0.0, grad_clip=0.1, loss_settings=settings)
    updater = PolicyUpdater(policy, spec)  # type: ignore[arg-type]
    half = math.log(0.5)
    rows = {
        "prompts": [torch.tensor([1]), torch.tensor([1])],
        "responses": [torch.tensor([0]), torch.tensor([1])],
        "response_mask": [torch.ones(1), torch.ones(1)],
        # ratio 1 for the first row; 1.25 / 1 for the second, over 1.2 with a positive advantage
        "old_log_probs": [torch.tensor([half]), torch.tensor([half - math.log(1.25)])],
        "advantages": [torch.tensor([1.0]), torch.tensor([2.0])],
    }
    outcome = updater.step(rows, [0, 1], 0.01)
    # loss = (-1 * 1 - 2 * 1.2) / 2; the second row is clipped and teaches nothing.
    # d logp(0) / d logits = (1 - 1/2, -1/2), so the gradient is -(0.5, -0.5) / 2 = (-0.25, 0.25)
    assert outcome.metrics["pg_loss"] == pytest.approx(-1.7)
    assert outcome.metrics["pg_clipfrac"] == pytest.approx(0.5)
    assert outcome.metrics["grad_norm"] == pytest.approx(0.25 * math.sqrt(2))
    gradient = policy.net.logits.grad
    assert gradient is not None
    # cut to a norm of 0.1
    assert gradient.tolist() == pytest.approx([-0.1 / math.sqrt(2), 0.1 / math.sqrt(2)], rel=1e-4)
    # AdamW's first step is the learning rate times the gradient's sign
    assert policy.net.logits.tolist() == pytest.approx([0.01, -0.01], rel=1e-4)
