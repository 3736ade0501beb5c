"""Presets, and how preset, tree and overrides are merged."""

from pathlib import Path

import pytest

from rlcore.config import find_preset, load_config, preset_names, resolve_config
from rlcore.errors import ConfigError

REPOSITORY = Path(__file__).resolve().parents[3]


def test_every_preset_loads_without_notices():
    files = sorted((REPOSITORY / "deployments" / "runs").glob("*.yaml"), key=lambda p: p.stem)
    names = [
        "calculator-tiny",
        "frozen-lake-tiny",
        "grpo-smollm2",
        "grpo-smollm2-colocate-async",
        "grpo-smollm2-separate-async",
        "grpo-tiny",
        "grpo-tiny-curriculum",
        "openai-agent-tiny",
    ]
    assert [path.stem for path in files] == preset_names() == names
    for path in files:
        by_name, by_path = resolve_config(path.stem), resolve_config(path)
        assert by_name.config == by_path.config
        assert by_name.notices == []


def test_the_main_jobs_settings():
    config = load_config("grpo-smollm2")
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert (config.data.train_batch_size, rollout.n, config.num_optimizer_steps) == (8, 8, 1)
    assert (actor.optim.lr, actor.optim.betas, actor.optim.weight_decay) == (2e-5, (0.9, 0.99), 0)
    assert (actor.dtype, rollout.dtype, rollout.temperature) == ("bfloat16", "bfloat16", 1.0)
    assert (config.trainer.total_training_steps, config.trainer.test_freq) == (45, 15)
    assert config.data.max_response_length == 16


def test_presets_are_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_preset("grpo-tiny") == REPOSITORY / "deployments" / "runs" / "grpo-tiny.yaml"


def test_a_preset_of_the_project_one_stands_in_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("deployments/runs").mkdir(parents=True)
    Path("deployments/runs/grpo-tiny.yaml").write_text(
        "data: {train_files: here, val_files: here}\n"
        "actor_rollout_ref: {model: {path: m}, actor: {use_dynamic_bsz: true}, rollout: {n: 2}}\n"
    )
    assert load_config("grpo-tiny").data.train_files == ("here",)


@pytest.mark.parametrize(
    ("preset", "message"),
    [
        ("grpo-tinny", "did you mean grpo-tiny?"),
        ("nope.yaml", "no such file"),
        ("", "known: calculator-tiny, frozen-lake-tiny, grpo-smollm2, grpo-smollm2-col"),
    ],
)
def test_missing_presets(preset, message):
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        find_preset(preset)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data: [", "cannot be read"),
        ("- 1\n- 2\n", "must hold sections"),
        ("data:\n  seed: 1\n  seed: 2\n", "given twice"),
        ("1: 2\n", "no word"),
        (b"\xff\xfe\x00", "cannot be read"),
    ],
)
def test_broken_presets(tmp_path, text, message):
    path = tmp_path / "broken.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=message):
        load_config(path)


def test_an_empty_preset_is_only_defaults(tmp_path):
    path = tmp_path / "empty.yaml"
    path.write_text("# nothing\n")
    with pytest.raises(ConfigError, match=r"data\.train_files"):
        load_config(path)


def test_later_layers_win():
    tree = {"data": {"seed": 1, "train_batch_size": 8}, "seed": 2}
    config = load_config("grpo-tiny", ["data.seed=3", "data.seed=4"], tree)
    assert (config.data.seed, config.data.train_batch_size, config.seed) == (4, 8, 2)
    assert config.data.max_prompt_length == 64  # the preset's


def test_removal_goes_back_to_the_default():
    assert load_config("grpo-tiny", ["~trainer.total_training_steps"]).total_steps(64) == 16


def test_dicts_are_merged_and_lists_replaced():
    kwargs = "data.apply_chat_template_kwargs"
    config = load_config(
        "grpo-tiny",
        [f"{kwargs}={{a:1}}", f"+{kwargs}.b.c=2", "trainer.logger=[file]", "data={seed:9}"],
    )
    assert config.data.apply_chat_template_kwargs == {"a": 1, "b": {"c": 2}}
    assert config.trainer.logger == ("file",)
    assert (config.data.seed, config.data.train_batch_size) == (9, 4)


def test_overrides_as_a_dict():
    config = load_config("grpo-tiny", {"trainer.logger": "console", "seed": 3})
    assert (config.trainer.logger, config.seed) == (("console",), 3)


def test_numbers_that_yaml_reads_as_words(tmp_path):
    path = tmp_path / "run.yaml"
    text = find_preset("grpo-tiny").read_text().replace("1.0e-3", "1e-3")
    path.write_text(text)
    assert "1e-3" in text
    assert load_config(path).actor_rollout_ref.actor.optim.lr == 1e-3


def test_the_source_is_named():
    assert resolve_config("grpo-tiny").source == "preset grpo-tiny"
    assert resolve_config("grpo-tiny", ["seed=1"]).source == "preset grpo-tiny with 1 override"
