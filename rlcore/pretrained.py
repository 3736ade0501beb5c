"""Load a causal language model from a Hugging Face folder, with an error that names the folder."""

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

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
        raise _unreadable(model_path, error) from error
    return model.eval()


def outline_of(model_path: str, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """Return the model without its weights, with the folder's generation config.

    Its tensors take no memory: they tell names, shapes and which are tied.

    Raises:
        ConfigError: the folder is incomplete, or transformers cannot run the model.
    """
    try:
        config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
        if (Path(model_path) / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(model_path)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise _unreadable(model_path, error) from error
    return model


def _unreadable(model_path: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"actor_rollout_ref.model.path={model_path}: the model cannot be loaded: "
        f"{type(error).__name__}: {error}"
    )


def eos_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """Return the tokens that end a response by the model's own configuration."""
    return tuple(dict.fromkeys(_eos_of_configs(model)))


def _eos_of_configs(model: PreTrainedModel) -> Iterator[int]:
    for config in (model.generation_config, model.config):
        eos = getattr(config, "eos_token_id", None)
        if isinstance(eos, int):
            yield eos
        elif eos is not None:
            yield from eos
