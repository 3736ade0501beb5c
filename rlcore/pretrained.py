"""Load a causal language model from a Hugging Face folder, with an error that names the folder."""

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel

from rlcore.errors import ConfigError


def load_causal_lm(
    model_path: str,
    dtype: torch.dtype,
    *,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
) -> PreTrainedModel:
    """Return the model in evaluation mode, with weights of type `dtype`.

    Args:
        model_path: The folder.
        dtype: Of the weights.
        trust_remote_code: Let the folder run code of its own.
        attn_implementation: Name in transformers' attention registry; None for its choice.

    Raises:
        ConfigError: the folder is incomplete or damaged, or transformers cannot run the model.
    """
    try:
        model = AutoModelForCausalLM.from_pretrained(
            model_path,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            attn_implementation=attn_implementation,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ConfigError(
            f"actor_rollout_ref.model.path={model_path}: the model cannot be loaded: "
            f"{type(error).__name__}: {error}"
        ) from error
    return model.eval()
