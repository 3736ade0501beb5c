"""Packed and padded layouts, the fused head and the blocks give one answer: that of the model."""

import pytest
import torch

from rlcore.algorithms import token_entropy, token_logp
from rlcore.training.attention import BlockAttention
from rlcore.training.head import linear_logp_entropy
from rlcore.training.layout import packed_layout, padded_layout
from rlcore.training.policy import Policy


def reference(policy: Policy, prompts, responses, temperature: float):
    """One plain forward pass per row."""
    logp, entropy = [], []
    for prompt, response in zip(prompts, responses, strict=True):
        ids = torch.cat([prompt, response])[None]
        logits = policy.model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        logp.append(token_logp(logits, response, temperature))
        entropy.append(token_entropy(logits, temperature))
    return torch.cat(logp), torch.cat(entropy)


def gradient(policy: Policy, logp, entropy) -> torch.Tensor:
    weights = torch.linspace(-1, 1, len(logp))
    policy.model.zero_grad(set_to_none=True)
    (logp @ weights + 0.3 * (entropy @ weights.flip(0))).backward()
    return torch.cat([p.grad.flatten() for p in policy.model.parameters()])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("packing", ["shared_prefix", "padded"])
def test_log_probs_entropy_and_gradient_are_those_of_single_rows(
    model_path, make_rows, packing, temperature
):
    rows, _ = make_rows()
    prompts, responses = rows["prompts"], rows["responses"]
    plain = Policy(model_path, dtype="float32", packing="padded")
    expected = reference(plain, prompts, responses, temperature)
    policy = Policy(model_path, dtype="float32", packing=packing)
    assert policy.packing == packing
    found = policy.log_probs(policy.layout(prompts, responses), temperature)
    for got, want in zip(found, expected, strict=True):
        assert torch.allclose(got, want, atol=2e-5)
    wanted = gradient(plain, *expected)
    got = gradient(policy, *found)
    assert (got - wanted).norm() / wanted.norm() < 1e-5


def test_one_group_shares_the_whole_prompt(model_path, make_rows):
    rows, _ = make_rows(num_groups=1, per_group=4)
    packed = packed_layout(rows["prompts"], rows["responses"])
    assert packed.num_tokens == len(rows["prompts"][0]) + sum(map(len, rows["responses"]))
    policy = Policy(model_path, dtype="float32")
    found = policy.log_probs(packed, 1.0)[0]
    plain = Policy(model_path, dtype="float32", packing="padded")
    assert torch.allclose(found, reference(plain, *map(rows.get, ("prompts", "responses")), 1.0)[0])


def test_a_token_is_packed_once_and_padding_costs():
    a, b = torch.tensor([5, 6, 7]), torch.tensor([5, 6, 8, 9])
    responses = [torch.tensor([1, 2]), torch.tensor([3]), torch.tensor([4, 4, 4])]
    packed = packed_layout([a, b, a], responses)
    assert packed.model_inputs["input_ids"].tolist() == [[5, 6, 7, 1, 2, 4, 4, 4, 8, 9, 3]]
    assert packed.model_inputs["position_ids"].tolist() == [[0, 1, 2, 3, 4, 3, 4, 5, 2, 3, 4]]
    assert packed.predictors.tolist() == [2, 3, 9, 2, 5, 6]
    assert packed.targets.tolist() == [1, 2, 3, 4, 4, 4]
    padded = padded_layout([a, b, a], responses)
    assert (packed.num_tokens, padded.num_tokens) == (11, 18)
    assert padded.predictors.tolist() == [2, 3, 9, 14, 15, 16]


def test_empty_responses_have_no_log_probs(model_path):
    prompt, empty = torch.tensor([5, 6, 7]), torch.empty(0, dtype=torch.long)
    policy = Policy(model_path, dtype="float32")
    layout = policy.layout([prompt, prompt], [empty, torch.tensor([8])])
    assert len(policy.log_probs(layout, 1.0)[0]) == 1


def test_small_blocks_give_the_same(model_path, make_rows):
    rows, _ = make_rows(per_group=4)
    policy = Policy(model_path, dtype="float32")
    whole = packed_layout(rows["prompts"], rows["responses"])
    expected = policy.log_probs(whole, 1.0)[0]
    cut = packed_layout(rows["prompts"], rows["responses"], max_block_pairs=20)
    assert len(cut.model_inputs["attention_blocks"]) > len(whole.model_inputs["attention_blocks"])
    assert torch.allclose(policy.log_probs(cut, 1.0)[0], expected, atol=1e-5)


def test_block_attention_has_the_right_derivative():
    torch.manual_seed(0)
    prompts = [torch.arange(3), torch.tensor([0, 1, 5, 6])]
    responses = [torch.arange(2), torch.arange(3)]
    blocks = packed_layout(prompts, responses).model_inputs["attention_blocks"]
    tokens = 2 + 1 + 2 + 2 + 3
    q, k, v = (
        torch.randn(tokens, heads, 4, dtype=torch.double, requires_grad=True) for heads in (4, 2, 2)
    )
    assert torch.autograd.gradcheck(lambda *x: BlockAttention.apply(*x, 0.5, blocks), (q, k, v))


def test_fused_head_has_the_right_values_and_derivative():
    torch.manual_seed(0)
    hidden = torch.randn(5, 3, dtype=torch.double, requires_grad=True)
    weight = torch.randn(700, 3, dtype=torch.double, requires_grad=True)
    ids = torch.tensor([0, 699, 300, 255, 256])
    found = linear_logp_entropy(hidden, weight, ids, 0.7, slice_elements=1)
    logits = hidden @ weight.t()
    assert torch.allclose(found[0], token_logp(logits, ids, 0.7))
    assert torch.allclose(found[1], token_entropy(logits, 0.7))
    small = weight.detach()[:9].requires_grad_()
    few = torch.tensor([0, 8, 3, 3, 1])
    assert torch.autograd.gradcheck(
        lambda h, w: linear_logp_entropy(h, w, few, 0.7), (hidden, small)
    )


def test_bf16_autocast_is_near_float32(model_path, make_rows):
    rows, _ = make_rows()
    exact = Policy(model_path, dtype="float32")
    layout = exact.layout(rows["prompts"], rows["responses"])
    rough = Policy(model_path, dtype="bfloat16").log_probs(layout, 1.0)[0]
    difference = (rough - exact.log_probs(layout, 1.0)[0]).abs()
    assert 0 < difference.max() < 0.05
    assert rough.dtype == torch.float32
