"""The causal language model being trained, seen as: rows in, log-probs of their responses out.

Legend: M response tokens of all rows.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlcore.algorithms.logits import token_entropy, token_logp
from rlcore.pretrained import load_causal_lm
from rlcore.training.head import linear_logp_entropy
from rlcore.training.layout import Layout, Packing
from rlcore.training.lora import add_lora, without_lora
from rlcore.training.plan import LoraSpec
from rlcore.training.ranks import Ranks
from rlcore.training.row_model import AutocastType, RowModel


class Policy(RowModel):
    """A causal language model: log-prob and entropy of every response token.

    Example:
        >>> policy = Policy("models/smollm2-135m-instruct", dtype="bfloat16")
        >>> logp, entropy = policy.log_probs(policy.layout(prompts, responses), temperature=1.0)
    """

    def __init__(
        self,
        model_path: str,
        *,
        dtype: AutocastType,
        packing: Packing = "shared_prefix",
        trust_remote_code: bool = False,
        ranks: Ranks | None = None,
        lora: LoraSpec | None = None,
        gradient_checkpointing: bool = False,
    ) -> None:
        model = load_causal_lm(model_path, torch.float32, trust_remote_code=trust_remote_code)
        super().__init__(
            model, dtype=dtype, packing=packing, gradient_checkpointing=gradient_checkpointing
        )
        if lora is not None:
            add_lora(model, lora)
        self.place(ResponseLogProbs(model), ranks or Ranks())

    def log_probs(
        self, layout: Layout, temperature: float
    ) -> tuple[Float[Tensor, " M"], Float[Tensor, " M"]]:
        """Return log-prob and entropy of every response token, row after row, in nats."""
        with self.autocast():
            return self.net(layout.to(self.model.device), temperature)

    def outputs(self, layout: Layout, temperature: float) -> tuple[Tensor, ...]:
        """Return log-prob and entropy, as `log_probs`."""
        return self.log_probs(layout, temperature)

    @torch.no_grad()
    def base_log_probs(self, layout: Layout, temperature: float) -> tuple[Tensor, ...]:
        """Return the log-probs of the model below the adapters, which is what it was at first."""
        with without_lora(self.model):
            return self.log_probs(layout, temperature)[:1]

    def freeze(self) -> None:
        """Let no gradient flow to the weights from now on."""
        for parameter in self.model.parameters():
            parameter.requires_grad = False


class ResponseLogProbs(nn.Module):
    """The model with its log-probs as forward pass: the root that FSDP shards."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self._has_plain_head = _plain_head(model) is not None

    def forward(self, layout: Layout, temperature: float) -> tuple[Tensor, Tensor]:
        """Return log-prob and entropy of every response token, row after row."""
        if not self._has_plain_head:
            logits = self.model(**layout.model_inputs, use_cache=False).logits
            logits = logits.flatten(0, 1)[layout.predictors]
            return (
                token_logp(logits, layout.targets, temperature),
                token_entropy(logits, temperature),
            )
        hidden = self.model.base_model(**layout.model_inputs, use_cache=False)[0]
        chosen = hidden.flatten(0, 1).index_select(0, layout.predictors)
        # Asked for here: under FSDP the whole weight is there in the forward pass only.
        head = _plain_head(self.model)
        assert head is not None
        return linear_logp_entropy(chosen, head, layout.targets, temperature)


def _plain_head(model: PreTrainedModel) -> nn.Parameter | None:
    """Return the output projection if the logits are nothing but hidden times it."""
    head = model.get_output_embeddings()
    config = model.config.get_text_config()
    rescales = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
    if not isinstance(head, nn.Linear) or head.bias is not None:
        return None
    if any(getattr(config, name, None) is not None for name in rescales):
        return None
    weight = head.weight
    return weight if isinstance(weight, nn.Parameter) else None
