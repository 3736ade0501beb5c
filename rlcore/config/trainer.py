"""Sections `trainer`, `deadlines` and `ray`: the run itself."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from rlcore.config.base import Float, Int, Paths, PathText, Section, as_tuple

Tracker = Literal["console", "tensorboard", "file"]
Trackers = Annotated[tuple[Tracker, ...], BeforeValidator(as_tuple)]


class V1Config(Section):
    """Which trainer."""

    trainer_mode: Literal["sync"] = "sync"
    """`sync`: generate, train and update weights in turn."""


class TrainerConfig(Section):
    """Length, rhythm and results of the run."""

    total_epochs: Int = Field(default=30, ge=1)
    """Passes over the training prompts at most."""
    total_training_steps: Int | None = Field(default=None, ge=1)
    """Steps of the run; null: all that `total_epochs` gives."""
    project_name: str = "rollflow"
    """Name of the project in trackers (verl: verl_examples)."""
    experiment_name: str = "train"
    """Name of the run in trackers and in the run id (verl: gsm8k)."""
    logger: Trackers = ("console", "tensorboard", "file")
    """Trackers (verl: console and wandb; these need no account)."""
    nnodes: Literal[1] = 1
    """Hosts of the training worker."""
    n_gpus_per_node: Literal[1] = 1
    """Ranks of the training worker (verl: 8); one, on the CPU."""
    device: Literal["cpu"] = "cpu"
    """Device of training and generation (verl: cuda)."""
    save_freq: Int = Field(default=-1, ge=-1)
    """Save a checkpoint every this many steps and at the end; -1 or 0: never."""
    test_freq: Int = Field(default=-1, ge=-1)
    """Validate every this many steps and at the end; -1 or 0: never."""
    val_before_train: bool = True
    """Validate before step 1."""
    val_only: bool = False
    """Validate once and stop."""
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    """`auto`: continue the checkpoint in `default_local_dir`, if that is set and has one."""
    resume_from_path: PathText | None = None
    """Checkpoint folder to start from, with `resume_mode=resume_path`."""
    default_local_dir: PathText | None = None
    """The run folder; null: `<runs_root>/<run id>` (verl: checkpoints/project/experiment)."""
    runs_root: PathText = "runs"
    """Folder of all runs and of Prefect's embedded database (ours)."""
    max_actor_ckpt_to_keep: Int | None = Field(default=None, ge=1)
    """Checkpoints to keep beside the best and referenced ones; null: all."""
    log_val_generations: Int = Field(default=0, ge=0)
    """Validation responses to show per validation."""
    steps_per_page: Int = Field(default=1, ge=1)
    """Steps on one page (subflow) of the Prefect UI (ours)."""
    max_attempts: Int = Field(default=3, ge=1)
    """Attempts of one run before it is given up (ours)."""
    max_nonfinite_steps: Int = Field(default=3, ge=1)
    """Optimizer steps in a row that may be skipped for a non-finite loss or gradient (ours)."""
    user_modules: Paths = ()
    """Python files loaded at the start of every process, for registrations (ours)."""
    v1: V1Config = Field(default_factory=V1Config)
    """Which trainer."""


class DeadlinesConfig(Section):
    """Seconds after which a wait is overdue (ours); null: 10 times the median of the last 20."""

    device_lock: Float = Field(default=0, ge=0)
    """Wait for devices that another run holds; 0: refused at once."""
    add_batch_to_generate: Float | None = Field(default=None, gt=0)
    """Feeding the step's prompts."""
    sample_batch: Float | None = Field(default=None, gt=0)
    """Waiting for a batch of finished groups."""
    compute_reward: Float | None = Field(default=None, gt=0)
    """Scoring by a colocated reward model."""
    balance_batch: Float | None = Field(default=None, gt=0)
    """Distributing trajectories over ranks."""
    compute_old_log_probs: Float | None = Field(default=None, gt=0)
    """Log-probs under the weights at the start of the step."""
    compute_ref_log_probs: Float | None = Field(default=None, gt=0)
    """Log-probs under the frozen reference."""
    compute_values: Float | None = Field(default=None, gt=0)
    """Values of the critic."""
    compute_advantage: Float | None = Field(default=None, gt=0)
    """Advantages."""
    update_critic: Float | None = Field(default=None, gt=0)
    """Optimizer steps of the critic."""
    update_actor: Float | None = Field(default=None, gt=0)
    """Optimizer steps of the policy."""
    save_checkpoint: Float | None = Field(default=None, gt=0)
    """Writing a checkpoint."""
    commit_step: Float | None = Field(default=None, gt=0)
    """Marking the step's prompts as trained and releasing their rows."""
    update_weights: Float | None = Field(default=None, gt=0)
    """Bringing new weights to every replica."""
    validate_: Float | None = Field(default=None, gt=0, alias="validate")
    """Validation."""
    first_call: Float = Field(default=1800, gt=0)
    """First call of a phase without a deadline of its own: models are loaded then."""
    minimum: Float = Field(default=600, gt=0)
    """Least deadline of later calls of a phase without one of its own."""
    drain: Float = Field(default=20, gt=0)
    """Ending producers, replicas and workers."""
    queue: Float = Field(default=60, gt=0)
    """One call to the queue or the ledger."""
    start: Float = Field(default=300, gt=0)
    """Start of one actor, model loading included."""
    session: Float = Field(default=600, gt=0)
    """One session: generation, tools and reward."""
    control: Float = Field(default=120, gt=0)
    """One control call to a replica: abort, pause, sleep, wake up, prepare or commit weights."""

    def for_phase(self, phase: str) -> float | None:
        """Return the deadline that is configured for `phase`, or None.

        Read deadlines of phases by this method: `deadlines.validate` is a method of pydantic's.

        Args:
            phase: name of a phase task; one that a subclass adds has no key of its own.
        """
        if phase not in PHASES:
            return None
        return getattr(self, "validate_" if phase == "validate" else phase)


PHASES = (
    "add_batch_to_generate",
    "sample_batch",
    "compute_reward",
    "balance_batch",
    "compute_old_log_probs",
    "compute_ref_log_probs",
    "compute_values",
    "compute_advantage",
    "update_critic",
    "update_actor",
    "save_checkpoint",
    "commit_step",
    "update_weights",
    "validate",
)
"""The phases of a step, in their order."""


class RayConfig(Section):
    """The Ray cluster (ours)."""

    address: str | None = None
    """Address of a running cluster, or `auto`; null: a local one that belongs to the run."""
    num_cpus: Int = Field(default=16, ge=2)
    """Logical CPUs of the local cluster: places for actors, not cores."""
    num_threads: Int | None = Field(default=None, ge=1)
    """Threads of tensor maths per process; null: all cores."""
