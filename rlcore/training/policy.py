"""The causal language model being trained, seen as: rows in, log-probs of their responses out.

Legend: M response tokens of all rows.
"""

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlcore.algorithms.logits import token_entropy, token_logp
from rlcore.pretrained import load_causal_lm
from rlcore.training.attention import ATTENTION_NAME
from rlcore.training.head import linear_logp_entropy
from rlcore.training.layout import Layout, Packing, packed_layout, padded_layout

logger = logging.getLogger(__name__)


class Policy:
    """A transformers model with float32 weights whose forward pass may run under autocast.

    Example:
        >>> policy = Policy("models/smollm2-135m-instruct", dtype="bfloat16")
        >>> logp, entropy = policy.log_probs(policy.layout(prompts, responses), temperature=1.0)
    """

    def __init__(
        self,
        model_path: str,
        *,
        dtype: Literal["bfloat16", "float32"],
        packing: Packing = "shared_prefix",
        trust_remote_code: bool = False,
    ) -> None:
        self.dtype = dtype
        # dropout stays off (eval): log-probs before and during the update must be one function
        self.model: PreTrainedModel = load_causal_lm(
            model_path, torch.float32, trust_remote_code=trust_remote_code
        )
        self.packing: Packing = packing
        if packing == "shared_prefix" and not _can_pack(self.model):
            logger.info("%s: attention is not plain causal; rows are padded", model_path)
            self.packing = "padded"
        self.model.set_attn_implementation(
            ATTENTION_NAME if self.packing == "shared_prefix" else "sdpa"
        )
        self._head = _plain_head(self.model)

    def layout(self, prompts: Sequence[Tensor], responses: Sequence[Tensor]) -> Layout:
        """Lay the rows out for `log_probs`."""
        if self.packing == "shared_prefix":
            return packed_layout(prompts, responses)
        return padded_layout(prompts, responses)

    def log_probs(
        self, layout: Layout, temperature: float
    ) -> tuple[Float[Tensor, " M"], Float[Tensor, " M"]]:
        """Return log-prob and entropy of every response token, row after row, in nats."""
        with self._autocast():
            if self._head is None:
                logits = self.model(**layout.model_inputs, use_cache=False).logits
                logits = logits.flatten(0, 1)[layout.predictors]
                return (
                    token_logp(logits, layout.targets, temperature),
                    token_entropy(logits, temperature),
                )
            hidden = self.model.base_model(**layout.model_inputs, use_cache=False)[0]
            chosen = hidden.flatten(0, 1).index_select(0, layout.predictors)
            return linear_logp_entropy(chosen, self._head, layout.targets, temperature)

    def _autocast(self) -> AbstractContextManager[object]:
        if self.dtype == "bfloat16":
            return torch.autocast(self.model.device.type, dtype=torch.bfloat16)
        return nullcontext()


def _can_pack(model: PreTrainedModel) -> bool:
    """Whether every layer is plain causal attention through transformers' attention interface."""
    config = model.config.get_text_config()
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        is_full = getattr(config, "sliding_window", None) is None
    else:
        is_full = set(layer_types) == {"full_attention"}
    has_cap = getattr(config, "attn_logit_softcapping", None) is not None
    return is_full and not has_cap and bool(getattr(model, "_supports_attention_backend", False))


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
