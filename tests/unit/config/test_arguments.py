"""From keys to the arguments of algorithms: values, functions, README."""

import ast
import inspect
import json
from pathlib import Path

import jsonschema
import pytest
import yaml

import rlcore.algorithms
from rlcore.config import load_config, resolve_config
from rlcore.config.actor import ActorConfig
from rlcore.config.argument_table import ARGUMENTS, ESTIMATORS, GROUP_ESTIMATORS, LOSSES
from rlcore.config.arguments import arguments, keys_read_by
from rlcore.config.corrections import importance_weights, read_threshold, rejections
from rlcore.config.deviations import DEVIATIONS
from rlcore.config.docs import ROOT, SCHEMA_FILE, generated, is_read
from rlcore.config.names import kind_of
from rlcore.config.schema import json_schema
from rlcore.config.tree import all_fields, default_of, unit_of
from rlcore.testing.unchecked import unchecked_config
from rlcore.training.distillation import DistillationSpec

A = "actor_rollout_ref."
ACTOR = f"{A}actor."
CORRECTION = "algorithm.rollout_correction."
TEACHER = "distillation.teacher_models.teacher_model."


def raw(**keys):
    """A configuration whose rules are not asked: also with keys that are not read yet."""
    return unchecked_config({path.replace("__", "."): value for path, value in keys.items()})


def test_ppo_takes_verls_clips():
    config = load_config(
        "grpo-tiny", [f"{ACTOR}clip_ratio_high=0.28", f"{ACTOR}loss_agg_mode=seq-mean-token-sum"]
    )
    assert arguments(config, "ppo_loss") == {
        "clip_low": 0.2,
        "clip_high": 0.28,
        "dual_clip": 3.0,
        "agg": "seq-mean-token-sum",
    }


def test_cispo_bounds_are_absolute():
    config = raw(actor_rollout_ref__actor__clip_ratio_high=4.0)
    told = arguments(config, "cispo_loss")
    assert (told["ratio_min"], told["ratio_max"]) == (0.8, 5.0)  # 1 - 0.2, 1 + 4


def test_kl_kinds_and_the_clamp_of_k3_alone():
    key = "actor_rollout_ref__actor__kl_loss_type"
    assert arguments(raw(**{key: "low_var_kl"}), "kl_estimate") == {
        "kind": "k3",
        "value_clamp": 10.0,
    }
    assert arguments(raw(**{key: "mse"}), "kl_estimate") == {"kind": "k2", "value_clamp": None}
    assert arguments(raw(**{key: "k3+"}), "kl_estimate") == {"kind": "k3+", "value_clamp": None}
    assert arguments(load_config("grpo-tiny"), "kl_in_reward") == {"beta": 0.001, "kind": "k1"}


def test_a_teacher_is_learnt_from_as_asked():
    teacher = {"distillation.enabled": True, f"{TEACHER}model_path": "teacher"}
    config = load_config("grpo-tiny", teacher)
    assert DistillationSpec.from_config(config) == DistillationSpec(
        teacher_path="teacher",
        settings={"kind": "k3", "value_clamp": None, "agg": "token-mean"},
    )
    loss = "distillation.distillation_loss."
    asked = {
        f"{loss}loss_mode": "kl",
        f"{loss}use_policy_gradient": True,
        f"{loss}loss_max_clamp": 10,
        f"{loss}clip_ratio": 0.1,
        f"{loss}clip_ratio_high": 0.3,
        f"{loss}distillation_loss_coef": 0.5,
        f"{ACTOR}loss_agg_mode": "seq-mean-token-mean",
    }
    spec = DistillationSpec.from_config(load_config("grpo-tiny", {**teacher, **asked}))
    assert spec == DistillationSpec(
        teacher_path="teacher",
        is_policy_gradient=True,
        coef=0.5,
        settings={
            "kind": "k1",
            "value_clamp": 10,
            "clip_low": 0.1,
            "clip_high": 0.3,
            "dual_clip": 3.0,
            "agg": "seq-mean-token-mean",
        },
    )
    alone = {**teacher, f"{loss}use_task_rewards": False, f"{A}rollout.n": 1}
    config = load_config("grpo-tiny", alone)
    assert not config.learns_from_rewards and config.teacher_path == "teacher"
    spec = DistillationSpec.from_config(config)
    assert spec is not None and not spec.has_task_loss and spec.coef == 1
    assert DistillationSpec.from_config(load_config("grpo-tiny")) is None


def test_sizes_of_a_teachers_servers_are_told_to_have_no_effect():
    asked = [
        "distillation.n_gpus_per_node=4",
        "distillation.nnodes=1",
        "distillation.teacher_key=data_source",
        "distillation.distillation_loss.topk=64",
        f"{TEACHER}num_replicas=2",
        f"{TEACHER}key=math",
        f"{TEACHER}inference.tensor_model_parallel_size=2",
        f"{TEACHER}inference.engine_kwargs.vllm.max_logprobs=64",
    ]
    teacher = ["distillation.enabled=true", f"{TEACHER}model_path=x"]
    notices = resolve_config("grpo-tiny", [*teacher, *asked]).notices
    keys = [override.partition("=")[0] for override in asked]
    assert sorted(notice.partition("=")[0] for notice in notices) == sorted(keys)


def test_estimators():
    assert arguments(load_config("grpo-tiny"), "gae") == {"gamma": 1, "lam": 1, "whiten": True}
    config = load_config("grpo-tiny", ["algorithm.norm_adv_by_std_in_grpo=false"])
    assert arguments(config, "grpo") == {"norm_by_std": False, "singleton": "zero"}
    assert arguments(config, "agg_loss") == {"loss_scale_factor": 8.0}  # max_response_length
    assert "grpo" in GROUP_ESTIMATORS
    assert keys_read_by("reinforce_pp") == {"algorithm.gamma"}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"policy_loss": {"loss_mode": "gspo"}}, "seq-mean-token-mean"),
        ({"policy_loss": {"loss_mode": "sapo"}}, "seq-mean-token-mean"),
        ({"policy_loss": {"loss_mode": "cispo"}}, "token-mean"),
        ({"policy_loss": {"loss_mode": "gspo"}, "loss_agg_mode": "token-mean"}, "token-mean"),
    ],
)
def test_gspo_and_sapo_are_averaged_per_sequence_unless_asked_otherwise(keys, expected):
    actor = ActorConfig.model_validate(keys)
    assert actor.loss_agg_mode == expected
    # Written out, so that the same follows from what a run has recorded.
    assert ActorConfig.model_validate(actor.model_dump()) == actor


@pytest.mark.parametrize(
    ("text", "bounds"),
    [(2.0, (None, 2.0)), ("2", (None, 2.0)), ("0.5_2.0", (0.5, 2.0)), ("1_2", (1.0, 2.0))],
)
def test_thresholds(text, bounds):
    found = read_threshold(text)
    assert (found.lower, found.upper) == bounds


@pytest.mark.parametrize("text", ["x", "2_1", "0_1", -1, "1_2_3", "_2", 0])
def test_thresholds_that_mean_nothing(text):
    with pytest.raises(ValueError, match=str(text)):
        read_threshold(text)


def test_corrections_are_calls():
    keys = {
        f"{CORRECTION}rollout_is": "sequence",
        f"{CORRECTION}rollout_is_threshold": "0.5_2.0",
        f"{CORRECTION}rollout_rs": "token_k1,seq_mean_k3",
        f"{CORRECTION}rollout_rs_threshold": "2.0, 0.01",
    }
    config = raw(**{key.replace(".", "__"): value for key, value in keys.items()})
    assert importance_weights(config) == {
        "level": "sequence",
        "mode": "mask",
        "upper": 2.0,
        "lower": 0.5,
    }
    assert rejections(config) == (
        {"stat": "ratio", "level": "token", "lower": 0.5, "upper": 2.0},
        {"stat": "k3", "level": "seq_mean", "lower": None, "upper": 0.01},
    )
    assert importance_weights(load_config("grpo-tiny")) is None
    assert rejections(load_config("grpo-tiny")) == ()


@pytest.mark.parametrize("row", ARGUMENTS, ids=lambda row: f"{row.function}.{row.name}")
def test_functions_take_the_arguments_that_the_table_gives_them(row):
    names = set(row.name.split(", "))
    assert names <= set(inspect.signature(getattr(rlcore.algorithms, row.function)).parameters), row


def asked_for():
    """Functions whose arguments the product takes from the table, by the text of its calls."""
    asked = {*ESTIMATORS.values(), *LOSSES.values()}  # estimator_settings, loss_settings
    for path in Path(ROOT, "rlcore").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                if node.func.id == "arguments" and isinstance(node.args[1], ast.Constant):
                    asked.add(node.args[1].value)
                if node.func.id == "rejections":
                    asked.add("rejection_mask")
    return asked


def test_what_the_table_says_is_read_is_read_through_it():
    working = {row.function for row in ARGUMENTS if is_read(row)}
    assert {"grpo", "ppo_loss", "agg_loss", "overlong_penalty"} <= working
    assert working <= asked_for()


def test_every_key_of_the_table_is_in_the_tree():
    for row in ARGUMENTS:
        assert row.key is None or row.key in all_fields(), row
        assert bool(row.verl) == bool(row.restore), row
    for row in DEVIATIONS:
        assert set(row.keys) <= set(all_fields()), row
        assert row.restore


def test_readme_and_schema_are_current():
    for path, text in generated().items():
        assert (ROOT / path).read_text() == text, f"{path} is not current: run `make docs`"


def test_readme_names_what_works():
    readme = (ROOT / "README.md").read_text()
    for key in ("algorithm.adv_estimator", "trainer.v1.trainer_mode"):
        (line,) = [line for line in readme.splitlines() if line.startswith(f"| `{key}` |")][:1]
        for name in kind_of(key).works:
            assert f"`{name}`" in line


def test_every_number_has_a_unit():
    def holds_number(schema):
        kinds = {schema.get("type"), *(part.get("type") for part in schema.get("anyOf", []))}
        return kinds & {"integer", "number"} and "const" not in schema and "enum" not in schema

    root = json_schema()
    missing = []
    for path in all_fields():
        node = root
        for part in path.split("."):
            node = node["properties"][part]
            if "$ref" in node:
                node = {**root["$defs"][node["$ref"].rsplit("/", 1)[-1]], **node}
        assert node.get("description"), path
        if holds_number(node) and unit_of(path) is None:
            missing.append(path)
    assert missing == []


def test_schema_knows_units_limits_and_what_is_not_there():
    schema = json.loads((ROOT / SCHEMA_FILE).read_text())
    config = schema["$defs"]["ActorConfig"]["properties"]
    trainer = schema["$defs"]["TrainerConfig"]["properties"]
    assert config["ppo_max_token_len_per_gpu"]["unit"] == "tokens"
    assert config["ppo_max_token_len_per_gpu"]["minimum"] == 1
    assert "not_yet" in trainer["device"]
    assert schema["additionalProperties"] is False
    assert "required" not in json.dumps(schema["$defs"]["DataConfig"])


def test_presets_fit_the_schema():
    validator = jsonschema.Draft202012Validator(json.loads((ROOT / SCHEMA_FILE).read_text()))
    presets = sorted(Path(ROOT, "deployments", "runs").glob("*.yaml"))
    assert presets
    for path in presets:
        tree = yaml.safe_load(path.read_text())
        assert [error.message for error in validator.iter_errors(tree)] == [], path
        wrong = {**tree, "data": {**tree["data"], "train_batch_size": "many", "sead": 1}}
        assert len(list(validator.iter_errors(wrong))) == 2


def test_presets_name_the_schema():
    for path in sorted(Path(ROOT, "deployments", "runs").glob("*.yaml")):
        first = path.read_text().splitlines()[0]
        assert first == "# yaml-language-server: $schema=../preset.schema.json"
        assert default_of("seed") == 0
