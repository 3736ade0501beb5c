"""Scripts of verl's: what of each is honoured, satisfied, refused, and when it has to train."""

from pathlib import Path

import pytest

from rlcore.config.load import examine
from rlcore.config.names import KINDS
from rlcore.config.script import examine_script, read_script
from rlcore.config.shell import read_commands, unknown_in
from rlcore.config.tree import honoured_fields
from rlcore.errors import ConfigError

SCRIPTS = Path(__file__).resolve().parents[2] / "data" / "verl_scripts"
HOME = {"HOME": "/home/someone"}
A = "actor_rollout_ref."
MAIN = "python3 -m verl.trainer.main_ppo"

# What each script says that is refused as it stands. `rollflow check --from-verl FILE` shows the
# three lists; the counts are of keys that are honoured and satisfied.
TABLE = {
    "grpo": (28, 7, {f"{A}rollout.name"}),
    "ppo": (25, 3, {f"{A}rollout.name"}),
    "rloo": (18, 3, {"trainer.device", f"{A}rollout.name"}),
    "dapo": (
        37,
        2,
        {
            "trainer.nnodes",
            f"{A}actor.ulysses_sequence_parallel_size",
            f"{A}rollout.name",
        },
    ),
    "gspo": (20, 3, {f"{A}rollout.name"}),
    "async": (
        20,
        4,
        {
            f"{A}rollout.checkpoint_engine.backend",
            f"{A}rollout.n_gpus_per_node",
            f"{A}rollout.name",
            f"{A}rollout.nnodes",
        },
    ),
}

# What is left once model, data, engine and devices are the tiny ones: missing features.
MISSING = {
    "async": TABLE["async"][2] - {f"{A}rollout.name"},
}


def script_of(name):
    (path,) = SCRIPTS.glob(f"*/{name}.sh")
    return path.read_text()


def shrunk():
    return (SCRIPTS / "shrunk.txt").read_text().splitlines()


@pytest.mark.parametrize("name", TABLE)
def test_every_key_of_a_script_is_in_one_of_three_lists(name):
    found = examine_script(script_of(name), [], HOME)
    num_honoured, num_satisfied, refused = TABLE[name]
    assert set(found.refused) == refused
    assert (len(found.honoured), len(found.satisfied)) == (num_honoured, num_satisfied)
    keys = [word.lstrip("+").partition("=")[0] for word in read_script(script_of(name), HOME)[0]]
    listed = [text.partition("=")[0] for text in (*found.honoured, *found.satisfied)]
    assert sorted([*listed, *found.refused]) == sorted(keys)
    for problem in found.examination.problems:
        assert problem.reason
        assert problem.fix


@pytest.mark.parametrize("name", sorted(path.stem for path in (SCRIPTS / "trains").glob("*.sh")))
def test_a_script_whose_features_are_there_can_be_run_when_shrunk(name):
    found = examine_script(script_of(name), shrunk(), HOME)
    assert found.refused == ()
    assert found.examination.config is not None


@pytest.mark.parametrize("name", sorted(path.stem for path in (SCRIPTS / "missing").glob("*.sh")))
def test_a_script_that_is_refused_names_the_features_that_are_missing(name):
    refused = set(examine_script(script_of(name), shrunk(), HOME).refused)
    assert refused, f"{name}.sh can be run by now: move it to trains/, where it is trained"
    assert refused == MISSING[name], f"{name}.sh: some of its features have landed or gone"


@pytest.mark.parametrize("name", MISSING)
def test_no_script_is_refused_for_keys_that_are_honoured_by_now(name):
    # A name that is not there yet is the value of an honoured key.
    of_names = {kind.key for kind in KINDS}
    for key in MISSING[name] - of_names:
        assert key not in honoured_fields(), f"{name}.sh: {key} is honoured by now"


def test_where_a_script_says_nothing_verls_default_holds():
    needed = ["data.train_files=a", "data.val_files=b", f"{A}model.path=c"]
    found = examine_script(" ".join([MAIN, *needed, f"{A}actor.clip_ratio=0.3"]), [], {})
    config = found.examination.config
    assert config is None or config.algorithm.adv_estimator == "gae"
    assert "algorithm.adv_estimator" not in {p.path for p in found.examination.problems}
    text = " ".join([MAIN, "algorithm.adv_estimator=grpo", *needed, f"{A}rollout.n=4"])
    text += f" {A}actor.use_dynamic_bsz=True {A}actor.clip_ratio=0.3"
    actor = examine_script(text, [], {}).examination.config.actor_rollout_ref.actor
    # In verl a lone clip_ratio has no effect; in a preset of ours it has.
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == (0.2, 0.2)
    assert actor.loss_agg_mode == "token-mean"


def test_what_has_no_effect_in_verl_either_is_no_problem():
    found = examine_script(script_of("gspo"), shrunk(), HOME)
    (notice,) = [text for text in found.satisfied if "clip_ratio_c" in text]
    assert notice == (
        f"{A}actor.clip_ratio_c=10.0: it has no effect with {A}actor.policy_loss.loss_mode=gspo"
    )
    assert found.examination.config.actor_rollout_ref.actor.clip_ratio_c == 3.0


RS = "algorithm.rollout_correction.rollout_rs"


def test_what_means_something_else_in_verl_is_said_in_our_terms():
    words = [
        "algorithm.filter_groups.enable=True",
        "algorithm.filter_groups.max_num_gen_batches=10",
        f"{RS}=\"'token_k1,seq_mean_k3'\"",
        f"{RS}_threshold=\"'0.5_1.25, 0.01'\"",
        "algorithm.adv_estimator=rloo_vectorized",
    ]
    needed = ["data.train_files=a", "data.val_files=b", f"{A}model.path=c"]
    needed += [f"{A}actor.use_dynamic_bsz=true", f"{A}rollout.n=4"]
    found = examine_script("\n".join([*needed, *words]), [], {})
    config = found.examination.config
    # verl bounds the inverse of the ratio: 1 / 1.25 and 1 / 0.5. It does not read the limit.
    assert config.algorithm.rollout_correction.rollout_rs_threshold == "0.8_2,0.01"
    assert config.algorithm.filter_groups.max_num_gen_batches == 0
    assert config.algorithm.singleton == "zero"
    told = [text.partition("=")[0] for text in found.satisfied]
    assert {f"{RS}_threshold", "algorithm.filter_groups.max_num_gen_batches"} <= set(told)
    listed = [text.partition("=")[0] for text in (*found.honoured, *found.satisfied)]
    assert len(listed) == len(set(listed))


def test_what_is_resolved_is_what_the_flow_gets():
    found = examine_script(script_of("grpo"), shrunk(), HOME)
    again = examine(None, (), found.tree)
    assert again.problems == []
    assert again.config == found.examination.config


def test_the_list_of_overrides_alone():
    words, problems = read_script("seed=1 +data.seed=2 ~trainer.save_freq\n a.b='x y'", {})
    assert words == ["seed=1", "+data.seed=2", "~trainer.save_freq", "a.b=x y"]
    assert problems == []


def test_a_file(tmp_path):
    path = tmp_path / "run.sh"
    path.write_text(f"{MAIN} seed=1\n")
    assert read_script(str(path), {}) == (["seed=1"], [])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nowhere.sh", "neither a command with overrides nor a file"),
        ("python3 -m recipe.dapo.main_dapo a=1", "not `python3 -m verl.trainer.main_ppo`"),
        (f"{MAIN} a=1\n{MAIN} a=2\n", "2 times"),
        ("# a=1\n", "no overrides"),
    ],
)
def test_what_is_no_script(text, message):
    with pytest.raises(ConfigError, match=message):
        read_script(text, {})


@pytest.mark.parametrize(
    ("text", "path", "reason"),
    [
        (f"{MAIN} a.b=$X", "a.b", "variable X is not set"),
        (f"{MAIN} ++a.b=$(date)", "a.b", "is not run"),
        (f"{MAIN} a.b=`date`", "a.b", "is not run"),
        (f"if true; then\nX=1\nfi\n{MAIN} a.b=$X", "a.b", "set in a condition"),
        (f"f() {{ echo; }}\nif true; then X=1; fi\n{MAIN} a.b=$X", "a.b", "set in a condition"),
        (f"if a; then if b; then c; fi; X=1; fi\n{MAIN} a.b=$X", "a.b", "set in a condition"),
        (f"f() {{ X=1; }}\n{MAIN} a.b=$X", "a.b", "set in a condition"),
        (f"[ -d x ] && X=1\n{MAIN} a.b=$X", "a.b", "set in a condition"),
        (f"[ -d x ] ||\nX=1\n{MAIN} a.b=$X", "a.b", "set in a condition"),
        (f"X=1 {MAIN} a.b=$X", "a.b", "variable X is not set"),
        (f"{MAIN} -cn ppo_megatron_trainer a=1", "-cn", "are not read"),
        (f"{MAIN} a.b=$((1 / 0))", "a.b", "not computed"),
        (f"{MAIN} a.b=$((n ** 2))", "a.b", "not computed"),
        (f"{MAIN} a.b=${{X%.*}}", "a.b", "not followed"),
        (f"{MAIN} --config-name=ppo_megatron_trainer.yaml a=1", "--config-name", "are not read"),
        (f"{MAIN} --config-path config a=1", "--config-path", "are not read"),
        (f"{MAIN} --help a=1", "--help", "no override"),
    ],
)
def test_what_cannot_be_followed_is_named(text, path, reason):
    _, problems = read_script(text, {})
    assert [problem.path for problem in problems] == [path]
    assert reason in problems[0].reason


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a \\\n  b", ["a", "b"]),
        ("a'b c'd", ["ab cd"]),
        ('"a\\"b" "c$X"', ['a"b', "cx y"]),
        ("$X", ["x", "y"]),
        ("pre$X", ["prex", "y"]),
        ('"$@" a "$*"', ["a"]),
        ('""', [""]),
        ("A=1 cmd b; cmd ${A:-unset}", ["cmd", "unset"]),
        ("A=0\nA=1 cmd $A", ["cmd", "0"]),
        ("A=1 B=$A\ncmd $B", ["cmd", "1"]),
        ("f() { echo; }\nN=1\ncmd $N", ["cmd", "1"]),
        ("true && cmd a", ["cmd", "a"]),
        ("L=(a 'b c')\ncmd \"${L[@]}\"", ["cmd", "a", "b c"]),
        ("L=(a)\nL+=(b)\ncmd ${L[@]}", ["cmd", "a", "b"]),
        ("cmd ${NO:-fall back}", ["cmd", "fall", "back"]),
        ('cmd "${NO:-$X}"', ["cmd", "x y"]),
        ("n=3\ncmd $((2 * (n + 1)))", ["cmd", "8"]),
        ("cmd a#b # c", ["cmd", "a#b"]),
        ("cmd a 2>&1 > log", ["cmd", "a"]),
        ("cmd \\$X '$X'", ["cmd", "$X", "$X"]),
        ("cmd [1,2] {a:1}", ["cmd", "[1,2]", "{a:1}"]),
    ],
)
def test_words_are_the_shells(text, words):
    commands = read_commands(text, {"X": "x y"})
    assert commands[-1] == words
    assert [unknown_in(word) for word in words] == [None] * len(words)
