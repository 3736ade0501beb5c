"""The typed `config` of a deployment: what its form shows, what is refused before a run exists."""

import pytest
from prefect.exceptions import ParameterTypeError
from prefect.utilities.schema_tools import validate
from prefect.utilities.schema_tools.validation import ValidationError

from flows.train import train
from rlcore.config import load_config
from rlcore.config.tree import honoured_fields
from tasks.parameters import PartialConfig, as_tree

SCHEMA = PartialConfig.model_json_schema()


def properties(section):
    return SCHEMA["$defs"][f"Partial{section}"]["properties"]


def every_leaf(schema):
    for name, field in schema["properties"].items():
        inner = SCHEMA["$defs"].get(field.get("$ref", "").removeprefix("#/$defs/"))
        inner = inner or next(
            (SCHEMA["$defs"][part["$ref"].removeprefix("#/$defs/")]
             for part in field.get("allOf", []) if "$ref" in part), None
        )  # fmt: skip
        if inner is None:
            yield name, field
        else:
            assert inner["additionalProperties"] is False
            yield from ((f"{name}.{below}", leaf) for below, leaf in every_leaf(inner))


def test_the_form_has_every_honoured_key_described_and_none_filled_in():
    leaves = dict(every_leaf(SCHEMA))
    assert leaves.keys() == honoured_fields().keys()
    for path, leaf in leaves.items():
        assert leaf["description"].startswith(str(honoured_fields()[path].description)), path
        assert "default" not in leaf, path


def test_the_form_shows_choices_bounds_and_defaults():
    trainer = properties("Trainer")
    assert trainer["resume_mode"]["enum"] == ["auto", "disable", "resume_path"]
    assert trainer["max_attempts"]["minimum"] == 1
    assert trainer["max_attempts"]["description"].endswith("Default: 3.")
    wall = trainer["max_wall_s"]["anyOf"]
    assert wall == [{"exclusiveMinimum": 0, "type": "number", "unit": "s"}, {"type": "null"}]
    betas = properties("Optim")["betas"]
    assert (betas["minItems"], betas["maxItems"]) == (2, 2)
    assert properties("Data")["train_files"]["type"] == "array"
    assert "required" not in SCHEMA


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"trainer": {"save_frek": 3}}, "save_frek"),
        ({"trainer": {"max_attempts": 0}}, "max_attempts"),
        ({"trainer": {"max_wall_s": 0}}, "max_wall_s"),
        ({"data": {"train_batch_size": "many"}}, "train_batch_size"),
        ({"trainer": {"resume_mode": "maybe"}}, "resume_mode"),
        ({"trane": {}}, "trane"),
    ],
)
def test_wrong_types_bounds_and_keys_are_refused_by_the_flow_and_by_the_server(config, named):
    with pytest.raises(ParameterTypeError, match=named):
        train.validate_parameters({"preset": "grpo-tiny", "config": config})
    # What the server does before it makes a run of a deployment.
    with pytest.raises(ValidationError):
        validate(
            {"preset": "grpo-tiny", "config": config},
            train.parameters.model_dump_for_openapi(),
            raise_on_error=True,
        )


def test_what_is_right_passes_the_server():
    validate(
        {
            "preset": "grpo-tiny",
            "overrides": {"trainer.save_freq": 3},
            "config": {"trainer": {"steps_per_page": "auto", "max_wall_s": None}, "data": {}},
            "resume": None,
        },
        train.parameters.model_dump_for_openapi(),
        raise_on_error=True,
    )


def test_only_the_keys_that_are_set_count_and_overrides_go_over_them():
    parameters = train.validate_parameters(
        {
            "preset": "grpo-tiny",
            "config": {"trainer": {"save_freq": 7}, "deadlines": {"validate": 5}},
        }
    )
    tree = as_tree(parameters["config"])
    assert tree == {"trainer": {"save_freq": 7}, "deadlines": {"validate": 5.0}}
    assert train.serialize_parameters(parameters)["config"] == tree
    config = load_config("grpo-tiny", {"trainer.test_freq": 5}, tree)
    assert (config.trainer.save_freq, config.trainer.test_freq) == (7, 5)
    assert config.trainer.total_training_steps == 4  # the preset's
    assert config.deadlines.for_phase("validate") == 5
    over = load_config("grpo-tiny", {"trainer.save_freq": 9}, tree)
    assert over.trainer.save_freq == 9


def test_a_null_that_a_key_may_hold_is_a_value():
    config = PartialConfig.model_validate({"trainer": {"max_actor_ckpt_to_keep": None}})
    assert as_tree(config) == {"trainer": {"max_actor_ckpt_to_keep": None}}
    assert as_tree(None) is None
