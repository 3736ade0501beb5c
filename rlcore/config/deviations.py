"""Where a default, or a meaning, differs from verl's, why, and the setting that restores it.

The README's table is rendered from these rows; scripts of verl's are laid over those that change
what is computed, so that their meaning is kept.
"""

from dataclasses import dataclass
from typing import Any

from rlcore.config.actor import SEQUENCE_AGG
from rlcore.config.argument_table import ESTIMATORS
from rlcore.config.arguments import keys_of, keys_read_by
from rlcore.config.corrections import inverted_k1
from rlcore.config.tree import Tree, get, markers, put

_ROLLOUT = "actor_rollout_ref.rollout."
_ACTOR = "actor_rollout_ref.actor."
_REWARD_MODEL = "reward.reward_model.rollout."
_CORRECTION = "algorithm.rollout_correction."
_RS_THRESHOLD = f"{_CORRECTION}rollout_rs_threshold"
_MAX_BATCHES = "algorithm.filter_groups.max_num_gen_batches"


@dataclass(frozen=True, kw_only=True, slots=True)
class Deviation:
    """One difference."""

    keys: tuple[str, ...]
    here: str
    """What rollflow does."""
    verl: str
    restore: str
    """The setting that restores verl's behaviour, or why there is none."""
    script: dict[str, Any] | None = None
    """What a script of verl's means where it says nothing; None: the same is computed."""


DEVIATIONS: tuple[Deviation, ...] = (
    Deviation(
        keys=("algorithm.adv_estimator",),
        here="`grpo`",
        verl="`gae`",
        restore="`algorithm.adv_estimator=gae`",
        script={"algorithm.adv_estimator": "gae"},
    ),
    Deviation(
        keys=(f"{_ACTOR}clip_ratio",),
        here="fills `clip_ratio_low` and `_high` where those are not set",
        verl="no effect alone: both are 0.2",
        restore="set both",
        script={f"{_ACTOR}clip_ratio_low": 0.2, f"{_ACTOR}clip_ratio_high": 0.2},
    ),
    Deviation(
        keys=(f"{_ACTOR}loss_agg_mode",),
        here="not set: `seq-mean-token-mean` with `gspo` and `sapo`",
        verl="not set: `token-mean` with `gspo`",
        restore="`loss_agg_mode=token-mean`",
        script={f"{_ACTOR}loss_agg_mode": "token-mean"},
    ),
    Deviation(
        keys=("data.custom_cls.path",),
        here="its items are read once, at start",
        verl="read at every use",
        restore="none: a row that changes could not be trained exactly once",
    ),
    Deviation(
        keys=("data.sampler.class_path",),
        here="`update` takes results (`PromptResult`) and needs `state_dict`, `load_state_dict`",
        verl="`update(batch: DataProto)`, no state",
        restore="none: a resumed run would choose other rows",
    ),
    Deviation(
        keys=("trainer.test_freq",),
        here="validation's `best@k` and `maj@k` are exact, without replacement",
        verl="bootstrap with replacement",
        restore="none",
    ),
    Deviation(
        keys=("data.train_files", "data.val_files"),
        here="questions shared by both, or held out twice, are refused",
        verl="not looked at",
        restore="none",
    ),
    Deviation(
        keys=("algorithm.singleton",),
        here="a group of one session has advantage 0",
        verl="its raw score",
        restore="`algorithm.singleton=raw`",
        script={"algorithm.singleton": "raw"},
    ),
    Deviation(
        keys=("algorithm.gpg_alpha_mode",),
        here="GPG's factor counts groups that differ",
        verl="rows with a non-zero score",
        restore="`algorithm.gpg_alpha_mode=nonzero_scores`",
        script={"algorithm.gpg_alpha_mode": "nonzero_scores"},
    ),
    Deviation(
        keys=("algorithm.gdpo_batch_norm",),
        here="GDPO's last step has one vote a trajectory",
        verl="one a token",
        restore="`algorithm.gdpo_batch_norm=token`",
        script={"algorithm.gdpo_batch_norm": "token"},
    ),
    Deviation(
        keys=("distillation.teacher_models.teacher_model.model_path",),
        here="one teacher, in the training workers, scaled by `rollout.temperature`",
        verl="one or several, on servers of their own (`inference`)",
        restore="none",
    ),
    Deviation(
        keys=("distillation.distillation_loss.use_policy_gradient",),
        here="advantages are of the log-probs at the start of the step",
        verl="of the present ones",
        restore="none; in the first optimizer step they are the same",
    ),
    Deviation(
        keys=("distillation.distillation_loss.use_task_rewards",),
        here="false: entropy bonus and KL loss stay, where they are asked for",
        verl="false: they are left out, too",
        restore="`actor.entropy_coeff=0`, `actor.use_kl_loss=false`",
    ),
    Deviation(
        keys=("trainer.v1.sampler.sync_refill_failed_groups",),
        here="groups with a failed session are dropped and refilled, in every mode",
        verl="sync mode pads them",
        restore="none",
    ),
    Deviation(
        keys=("seed", "data.seed", f"{_ROLLOUT}seed"),
        here="`data.seed` and `rollout.seed` follow `seed` when null",
        verl="null and 42",
        restore="set them",
    ),
    Deviation(
        keys=("algorithm.filter_groups.max_num_gen_batches",),
        here="the run fails when a step needs more",
        verl="not read",
        restore="`max_num_gen_batches=0`",
    ),
    Deviation(
        keys=("trainer.v1.separate_async.parameter_sync_step",),
        here="devices of their own are asked for with `trainer.device=cuda` only",
        verl="`rollout.nnodes` and `n_gpus_per_node` above 0",
        restore="set them",
    ),
    Deviation(
        keys=(f"{_ROLLOUT}agent.num_workers", f"{_ROLLOUT}max_num_seqs"),
        here="1 and 64",
        verl="8 and 256",
        restore="set them",
    ),
    Deviation(
        keys=(f"{_ROLLOUT}name",),
        here="`transformers`, the embedded engine",
        verl="no default",
        restore="`rollout.name=vllm`, where vLLM is installed (`make setup-vllm` on a CPU)",
    ),
    Deviation(
        keys=(f"{_ROLLOUT}tensor_model_parallel_size",),
        here="1",
        verl="2",
        restore="set it",
    ),
    Deviation(
        keys=("reward.num_workers",),
        here="2 processes, shared out over the agent loop workers",
        verl="8",
        restore="set it",
    ),
    Deviation(
        keys=(f"{_REWARD_MODEL}max_num_seqs", f"{_REWARD_MODEL}name"),
        here="16 and `transformers`",
        verl="1024 and no default",
        restore="set the first",
    ),
    Deviation(
        keys=("reward.timeout", "reward.max_memory_mb", f"{_ROLLOUT}multi_turn.tool_timeout"),
        here="60 s, 4096 MiB and 30 s, then an error: such a response has no reward",
        verl="no limits; its rate-limited manager has 300 s and scores 0",
        restore="set them; none for the 0",
    ),
    Deviation(
        keys=("trainer.logger", "trainer.project_name", "trainer.experiment_name"),
        here="console, tensorboard, file; own names",
        verl="console, wandb; verl_examples, gsm8k",
        restore="set them",
    ),
    Deviation(
        keys=("trainer.default_local_dir",),
        here="a folder per run under `trainer.runs_root`",
        verl="checkpoints/project/experiment",
        restore="set it",
    ),
    Deviation(
        keys=("trainer.n_gpus_per_node", "trainer.device", f"{_ROLLOUT}n_gpus_per_node"),
        here="1, `cpu`, 0",
        verl="8, `cuda`, the trainer's",
        restore="GPU training comes with its issue",
    ),
    Deviation(
        keys=("actor_rollout_ref.model.enable_gradient_checkpointing",),
        here="off, the critic's too",
        verl="on",
        restore="set it; memory and speed alone change",
    ),
    Deviation(
        keys=("actor_rollout_ref.model.lora.merge",),
        here="on: replicas get weights with the adapters in them",
        verl="off: they get the adapters alone",
        restore="`lora.merge=false`, with the engine `transformers`; the same is computed",
    ),
    Deviation(
        keys=("critic.model.path",),
        here="null: the policy's",
        verl="a model of its own",
        restore="set it",
    ),
    Deviation(
        keys=("transfer_queue.backend.SimpleStorage.total_storage_size",),
        here="no limit",
        verl="100000 rows",
        restore="set it to 100000",
    ),
    Deviation(
        keys=("trainer.v1.sampler.max_off_policy_strategy",),
        here="`pace` besides `drop` and `wait`, which looks ahead; the bound holds in all three",
        verl="no `pace`",
        restore="do not use it",
    ),
)


def verl_base(given: Tree) -> Tree:
    """Return what a script of verl's means where it says nothing, as a tree to lay it over.

    Keys that are not read yet, and those of estimators that the script did not choose, are left
    alone. SAPO always averages per sequence in verl, too.

    Args:
        given: What the script says.
    """
    base: Tree = {}
    estimator = get(given, "algorithm.adv_estimator") or "gae"
    of_others = keys_of(ESTIMATORS) - keys_read_by(ESTIMATORS.get(str(estimator), ""))
    for deviation in DEVIATIONS:
        for path, value in (deviation.script or {}).items():
            if path not in markers() and path not in of_others:
                base = put(base, path, value)
    if get(given, f"{_ACTOR}policy_loss.loss_mode") == "sapo":
        base = put(base, f"{_ACTOR}loss_agg_mode", SEQUENCE_AGG)
    if estimator == "rloo_vectorized":
        base = put(base, "algorithm.singleton", "zero")  # verl's two forms of RLOO differ here
    return base


def in_our_terms(given: Tree) -> tuple[Tree, dict[str, str]]:
    """Return what a script says with the keys changed whose value means something else in verl.

    Returns:
        The tree, and per changed key a notice that says what was changed and why.
    """
    notices: dict[str, str] = {}
    limit = get(given, _MAX_BATCHES)
    if isinstance(limit, int) and limit > 0:
        given = put(given, _MAX_BATCHES, 0)
        notices[_MAX_BATCHES] = f"{_MAX_BATCHES}={limit}: verl does not read it, so 0 is set"
    options, thresholds = get(given, f"{_CORRECTION}rollout_rs"), get(given, _RS_THRESHOLD)
    if isinstance(options, str) and isinstance(thresholds, str):
        ours = inverted_k1(options, thresholds)
        if ours != thresholds:
            given = put(given, _RS_THRESHOLD, ours)
            notices[_RS_THRESHOLD] = (
                f"{_RS_THRESHOLD}={thresholds}: verl bounds the inverse of the ratio, so "
                f"{ours} is set"
            )
    return given, notices
