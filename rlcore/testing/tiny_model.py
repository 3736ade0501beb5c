"""A tiny Llama with random weights and a character tokenizer: the whole pipeline in seconds.

The model cannot read, but it can learn which characters pay: the task of `write_tiny_data` rewards
the share of vowels in the response, so rewards of a group differ from the first step on.
"""

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from rlcore.data.parquet import write_rows

PAD, START, END, UNKNOWN = "<|pad|>", "<|im_start|>", "<|im_end|>", "<|unknown|>"
PAD_ID, START_ID, END_ID = 0, 1, 2
CHARACTERS = ["\n", *(chr(code) for code in range(32, 127))]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
VOWELS = "aeiou"
TINY_DATA_SOURCE = "rollflow/letters"


def build_tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per printable ASCII character and a chat template."""
    tokens = [PAD, START, END, UNKNOWN, *CHARACTERS]
    core = Tokenizer(
        models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=UNKNOWN)
    )
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        bos_token=START,
        eos_token=END,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_tiny_model(
    folder: Path,
    *,
    num_layers: int = 4,
    width: int = 128,
    seed: int = 0,
    spread: float = 0.02,
) -> None:
    """Save a random Llama (float32, about 0.6 M parameters by default) and tokenizer to `folder`.

    The weights depend on the arguments only; the process's random state is left as it was.

    Args:
        folder: Where.
        num_layers: Layers.
        width: Numbers per token.
        seed: Of the weights.
        spread: Standard deviation of the weights: the larger, the less even are its predictions.
    """
    tokenizer = build_tiny_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=spread,
        tie_word_embeddings=True,
        pad_token_id=PAD_ID,
        bos_token_id=START_ID,
        eos_token_id=END_ID,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        pad_token_id=PAD_ID, bos_token_id=START_ID, eos_token_id=END_ID
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_tiny_data(folder: Path, *, train_rows: int = 64, test_rows: int = 16) -> None:
    """Write train.parquet and test.parquet of the vowel task, with distinct questions."""
    sizes = {"train": train_rows, "test": test_rows}
    first = 0
    for split, num_rows in sizes.items():
        rows = [
            {
                "data_source": TINY_DATA_SOURCE,
                "prompt": [{"role": "user", "content": f"Vowels, line {first + i}"}],
                "reward_model": {"style": "rule", "ground_truth": VOWELS},
                "extra_info": {"index": i, "split": split, "question": f"line {first + i}"},
            }
            for i in range(num_rows)
        ]
        first += num_rows
        write_rows(folder / f"{split}.parquet", rows)


def build_tiny_reward_model(folder: Path, *, seed: int = 1) -> None:
    """Save a random Llama with a head of one output (float32) and the tiny tokenizer to `folder`.

    The weights depend on the arguments only; the process's random state is left as it was.
    """
    tokenizer = build_tiny_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        pad_token_id=PAD_ID,
        bos_token_id=START_ID,
        eos_token_id=END_ID,
        initializer_range=0.2,
    )
    config.num_labels = 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForSequenceClassification(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
