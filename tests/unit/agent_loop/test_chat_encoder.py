"""Turn-by-turn encoding equals the encoding of the whole conversation."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rlcore.agent_loop.chat_encoder import ChatEncoder, chat_encoder
from rlcore.errors import ConfigError

# SmolLM2's own template.
SMOLLM = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Llama's traits: a beginning token, a date and the tools before the first question, text without
# space at its ends, tool answers as JSON under a role of their own, which must follow a call.
LLAMA = (
    "{{ '<|begin|>' }}{{ '<|start|>system<|end|>\n\nToday: ' + date|default('1 Jan') }}"
    "{% if tools %}{{ '\nTools: ' + tools|tojson }}{% endif %}{{ '<|eot|>' }}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role == 'user' %}{{ raise_exception('no call') }}{% endif %}"
    "{{ '<|start|>ipython<|end|>\n\n' + m.content|tojson + '<|eot|>' }}"
    "{% else %}{{ '<|start|>' + m.role + '<|end|>\n\n' + m.content|trim + '<|eot|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant<|end|>\n\n' }}{% endif %}"
)
# Qwen's traits: reasoning only after the last question, an empty one in a last turn without,
# tools in the system message, consecutive tool answers as one message of the user.
QWEN = (
    "{% if tools %}{{ '<|im_start|>system\n# Tools\n' + tools|tojson + '<|im_end|>\n' }}{% endif %}"
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}"
    "{% endif %}{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% elif m.role == 'assistant' %}"
    "{% set text = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{{ '<|im_start|>assistant\n' }}"
    "{% if loop.index0 > ns.last and '</think>' in m.content %}{{ m.content }}"
    "{% elif loop.last %}{{ '<think>\n\n</think>\n\n' + text }}{% else %}{{ text }}{% endif %}"
    "{{ '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATES = {
    "smollm": (SMOLLM, "<|im_end|>"), "llama": (LLAMA, "<|eot|>"), "qwen": (QWEN, "<|im_end|>")
}  # fmt: skip
SPECIAL = [
    "<|im_start|>", "<|im_end|>", "<|begin|>", "<|start|>", "<|end|>", "<|eot|>", "<|other|>",
]  # fmt: skip
SCHEMA = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}


@pytest.fixture(scope="module")
def core():
    """A byte-level BPE with merges over letters, digits, spaces and line ends."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    text = (TEMPLATES["qwen"][0] + " the answer is 12.\n\n12 + 30 = 42\n" * 20) * 5
    tokenizer.train_from_iterator(
        [text],
        trainers.BpeTrainer(
            vocab_size=600, special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )  # fmt: skip
    return tokenizer


@pytest.fixture
def make_tokenizer(core):
    def make_tokenizer(name):
        template, end = TEMPLATES.get(name, (name, "<|im_end|>"))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=end)
        tokenizer.chat_template = template
        return tokenizer

    return make_tokenizer


def no_special(text):
    return not any(token in text for token in [*SPECIAL, "<think>", "</think>"])


# What the model writes starts with something visible: a line end there would be one token with
# the template's own, which is the case where encoding again would change what was sampled.
TURN = st.text(max_size=30).map(str.strip).filter(lambda t: t and no_special(t))
CONTENT = st.text(max_size=30).filter(no_special)
ROUND = st.tuples(TURN, st.one_of(st.lists(CONTENT, min_size=1, max_size=3), CONTENT))


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=30, deadline=None)
@given(question=CONTENT, rounds=st.lists(ROUND, min_size=1, max_size=4))
@example(question="👩‍👩‍👧 or 🇪🇺?", rounds=[("🎉", ["", "é" * 5000]), ("e\u0301", "")])
def test_turn_by_turn_is_the_whole(make_tokenizer_cached, name, question, rounds):
    tokenizer = make_tokenizer_cached(name)
    end = tokenizer.eos_token_id
    encoder = chat_encoder(tokenizer, {}, [end])
    messages = [{"role": "user", "content": question}]
    ids = encoder.start(messages)
    for turn, answers in rounds:
        ids += [*tokenizer(turn, add_special_tokens=False)["input_ids"], end]
        new = (
            [{"role": "user", "content": answers}]
            if isinstance(answers, str)
            else [{"role": "tool", "content": text} for text in answers]
        )
        ids += encoder.following(new)
        messages += [{"role": "assistant", "content": turn}, *new]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.fixture(scope="module")
def make_tokenizer_cached(core):
    made = {}

    def make(name):
        if name not in made:
            template, end = TEMPLATES[name]
            made[name] = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=end)
            made[name].chat_template = template
        return made[name]

    return make


def encoder_of(tokenizer, **kwargs):
    return ChatEncoder(tokenizer, kwargs, [tokenizer.eos_token_id])


def test_users_are_told_what_templates_do(make_tokenizer):
    [smollm] = encoder_of(make_tokenizer("smollm")).notices
    assert "does not show tools to the model" in smollm
    assert encoder_of(make_tokenizer("llama")).notices == []
    [qwen] = encoder_of(make_tokenizer("qwen")).notices
    assert "changes reasoning of the model in earlier turns" in qwen
    assert "keeps seeing its own tokens" in qwen


def test_reasoning_of_earlier_turns_stays_as_it_was_sampled(make_tokenizer):
    tokenizer = make_tokenizer("qwen")
    encoder = encoder_of(tokenizer)
    # The template itself would drop "secret" now; what follows does not depend on it.
    assert tokenizer.decode(encoder.following([{"role": "user", "content": "next"}])) == (
        "\n<|im_start|>user\nnext<|im_end|>\n<|im_start|>assistant\n"
    )


def test_consecutive_tool_messages_are_rendered_together(make_tokenizer):
    encoder = encoder_of(make_tokenizer("qwen"))
    text = make_tokenizer("qwen").decode(
        encoder.following([{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}])
    )
    assert text.count("<|im_start|>user") == 1
    assert text.count("<tool_response>") == 2


def test_tools_and_template_arguments_reach_the_start_only(make_tokenizer):
    tokenizer = make_tokenizer("llama")
    encoder = encoder_of(tokenizer, date="29 Nov")
    start = tokenizer.decode(encoder.start([{"role": "user", "content": "?"}], [SCHEMA]))
    assert "Today: 29 Nov\nTools:" in start
    assert '"add"' in start
    assert "Tools" not in tokenizer.decode(encoder.following([{"role": "tool", "content": "1"}]))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}"
         "{% endif %}{{ m.content }}<|im_end|>{% endfor %}", "no place for tool .*no tools"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "without a stop token"),
        ("{% for m in messages %}{% if m.role != 'assistant' %}{{ m.content }}<|im_end|>{% endif %}"
         "{% endfor %}", "leaves the text of the model's turn out"),
    ],
)  # fmt: skip
def test_a_template_that_cannot_be_used_is_refused(make_tokenizer, template, message):
    with pytest.raises(ConfigError, match=message):
        encoder_of(make_tokenizer(template))
