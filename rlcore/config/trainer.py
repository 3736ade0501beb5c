"""Sections `trainer`, `deadlines` and `ray`: the run itself."""

from typing import Annotated, Any, Literal

from pydantic import Field

from rlcore.config.base import (
    Batches,
    Count,
    Cpus,
    Devices,
    Epochs,
    Hosts,
    Paths,
    PathText,
    Seconds,
    Section,
    Share,
    Steps,
    Threads,
    Words,
)
from rlcore.config.pending import (
    CRITIC_CHECKPOINTS,
    DEVICE,
    HOSTS,
    LENDING,
    REFILL,
)


class ColocateAsyncConfig(Section):
    """Generation goes on while the policy trains, on the same devices."""

    num_warmup_batches: Batches = Field(default=1, ge=0)
    """Batches that are fed before step 1: the depth of the pipeline."""


class HybridRolloutConfig(Section):
    """Lending of training devices to generation."""

    enable_switch: bool = False
    """Lend them while training waits for trajectories."""
    switch_threshold_ratio: Share = Field(default=0.4, gt=0, le=1)
    """Share of a batch that must be there before they are taken back."""
    adaptive_switch_threshold: bool = True
    """Move that share by what switching costs."""
    switch_threshold_step_up: Share = Field(default=0.05, ge=0, le=1)
    """Step by which it rises."""
    switch_threshold_step_down: Share = Field(default=0.03, ge=0, le=1)
    """Step by which it falls."""
    switch_threshold_release_steps: Steps = Field(default=2, ge=1)
    """Steps without need after which it falls."""
    switch_cost_window_size: Steps = Field(default=3, ge=1)
    """Steps over which the cost of switching is averaged."""


class SeparateAsyncConfig(Section):
    """Generation has devices of its own."""

    num_warmup_batches: Batches = Field(default=1, ge=0)
    """Batches that are fed before step 1: the depth of the pipeline."""
    parameter_sync_step: Count = Field(default=4, ge=1)
    """Inner steps between two weight updates of the replicas."""
    in_flight_update: bool = False
    """Freeze running requests during an update and let them go on with their keys and values of
    the older weights, instead of cutting them off and reading their prefix again (ours)."""
    hybrid_rollout: Annotated[HybridRolloutConfig, LENDING] = Field(
        default_factory=HybridRolloutConfig
    )
    """Lending of training devices to generation."""


class CustomSamplerConfig(Section):
    """A ReplayBuffer of the user's."""

    path: PathText | None = None
    """Python file."""
    name: str | None = None
    """Class in that file."""


class SamplerConfig(Section):
    """Which finished groups a step trains."""

    max_off_policy_threshold: Steps | None = Field(default=8, ge=1)
    """Weight versions that a group may span; 1: on-policy, null: no limit."""
    max_off_policy_strategy: Literal["drop", "wait", "pace"] = "drop"
    """Stale groups are dropped, waited for, or not begun (`pace`, ours); idle in sync mode."""
    staleness_basis: Literal["dispatch", "tokens"] = "dispatch"
    """Count from the step that fed a prompt (verl), or from its oldest token's version (ours)."""
    sync_refill_failed_groups: Annotated[bool, REFILL] = True
    """Replace groups with failed sessions in sync mode too (verl: false, they are padded)."""
    custom_sampler: CustomSamplerConfig = Field(default_factory=CustomSamplerConfig)
    """A ReplayBuffer of the user's."""
    sampler_kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Passed on to it."""


StepsPerPage = Annotated[Steps, Field(ge=1)] | Literal["auto"]


class V1Config(Section):
    """Which trainer."""

    trainer_mode: str = "sync"
    """`sync`: generate, train and update weights in turn; others by name, or one of your own."""
    colocate_async: ColocateAsyncConfig = Field(default_factory=ColocateAsyncConfig)
    """Settings of that mode."""
    separate_async: SeparateAsyncConfig = Field(default_factory=SeparateAsyncConfig)
    """Settings of that mode."""
    sampler: SamplerConfig = Field(default_factory=SamplerConfig)
    """Which finished groups a step trains."""


class TrainerConfig(Section):
    """Length, rhythm and results of the run."""

    total_epochs: Epochs = Field(default=30, ge=1)
    """Passes over the training prompts at most."""
    total_training_steps: Steps | None = Field(default=None, ge=1)
    """Steps of the run; null: all that `total_epochs` gives."""
    project_name: str = "rollflow"
    """Name of the project in trackers (verl: verl_examples)."""
    experiment_name: str = "train"
    """Name of the run in trackers and in the run id (verl: gsm8k)."""
    logger: Words = ("console", "tensorboard", "file")
    """Trackers: console, tensorboard, file, wandb (verl: console and wandb)."""
    nnodes: Annotated[Hosts, HOSTS] = Field(default=1, ge=1)
    """Hosts of the training worker."""
    n_gpus_per_node: Devices = Field(default=1, ge=1)
    """Ranks of the training worker on each host (verl: 8); on the CPU they share its cores."""
    device: Annotated[Literal["cpu", "cuda"], DEVICE] = "cpu"
    """Device of training and generation (verl: cuda)."""
    save_freq: Steps = Field(default=-1, ge=-1)
    """Save a checkpoint every this many steps and at the end; -1 or 0: never."""
    snapshots: bool = True
    """Keep the state after every step in this host's shared memory, so that the death of a process
    costs one step at most; off: the steps since the last checkpoint (ours)."""
    test_freq: Steps = Field(default=-1, ge=-1)
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
    max_actor_ckpt_to_keep: Count | None = Field(default=None, ge=1)
    """Checkpoints to keep beside the best and referenced ones; null: all."""
    max_critic_ckpt_to_keep: Annotated[Count | None, CRITIC_CHECKPOINTS] = Field(default=None, ge=1)
    """Checkpoints of the critic to keep; null: all."""
    critic_warmup: Steps = Field(default=0, ge=0)
    """Steps in which the critic alone is trained."""
    log_val_generations: Count = Field(default=0, ge=0)
    """Validation responses to show per validation."""
    rollout_data_dir: PathText | None = None
    """Folder for all responses of every step, one file each."""
    validation_data_dir: PathText | None = None
    """Folder for all responses of every validation, one file each."""
    steps_per_page: StepsPerPage = Field(default=1)
    """Steps on one page (subflow) of the Prefect UI; `auto` groups fast ones (ours)."""
    max_wall_s: Seconds | None = Field(default=None, gt=0)
    """End the attempt after the step in which this many seconds since its start are over (ours)."""
    prefect_outage_s: Seconds = Field(default=600, ge=0)
    """Wait this long for a Prefect server that does not answer (ours)."""
    max_attempts: Count = Field(default=3, ge=1)
    """Attempts of one run before it is given up (ours)."""
    max_nonfinite_steps: Count = Field(default=3, ge=1)
    """Optimizer steps in a row that may be skipped for a non-finite loss or gradient (ours)."""
    user_modules: Paths = ()
    """Python files loaded at the start of every process, for registrations (ours)."""
    v1: V1Config = Field(default_factory=V1Config)
    """Which trainer."""


class DeadlinesConfig(Section):
    """Seconds after which a wait is overdue (ours); null: 10 times the median of the last 20."""

    device_lock: Seconds = Field(default=0, ge=0)
    """Wait for devices that another run holds; 0: refused at once."""
    add_batch_to_generate: Seconds | None = Field(default=None, gt=0)
    """Feeding the step's prompts."""
    sample_batch: Seconds | None = Field(default=None, gt=0)
    """Waiting for a batch of finished groups."""
    compute_reward: Seconds | None = Field(default=None, gt=0)
    """Scoring by a colocated reward model."""
    balance_batch: Seconds | None = Field(default=None, gt=0)
    """Distributing trajectories over ranks."""
    compute_old_log_probs: Seconds | None = Field(default=None, gt=0)
    """Log-probs under the weights at the start of the step."""
    compute_ref_log_probs: Seconds | None = Field(default=None, gt=0)
    """Log-probs under the frozen reference."""
    compute_teacher_log_probs: Seconds | None = Field(default=None, gt=0)
    """Log-probs under the teacher."""
    compute_values: Seconds | None = Field(default=None, gt=0)
    """Values of the critic."""
    compute_advantage: Seconds | None = Field(default=None, gt=0)
    """Advantages."""
    update_critic: Seconds | None = Field(default=None, gt=0)
    """Optimizer steps of the critic."""
    update_actor: Seconds | None = Field(default=None, gt=0)
    """Optimizer steps of the policy."""
    save_snapshot: Seconds | None = Field(default=None, gt=0)
    """Writing a snapshot."""
    save_checkpoint: Seconds | None = Field(default=None, gt=0)
    """Writing a checkpoint."""
    commit_step: Seconds | None = Field(default=None, gt=0)
    """Marking the step's prompts as trained and releasing their rows."""
    update_weights: Seconds | None = Field(default=None, gt=0)
    """Bringing new weights to every replica."""
    validate_: Seconds | None = Field(default=None, gt=0, alias="validate")
    """Validation."""
    first_call: Seconds = Field(default=1800, gt=0)
    """First call of a phase without a deadline of its own: models are loaded then."""
    minimum: Seconds = Field(default=600, gt=0)
    """Least deadline of later calls of a phase without one of its own."""
    drain: Seconds = Field(default=20, gt=0)
    """Ending producers, replicas and workers."""
    queue: Seconds = Field(default=60, gt=0)
    """One call to the queue or the ledger."""
    start: Seconds = Field(default=300, gt=0)
    """Start of one actor, model loading included."""
    session: Seconds = Field(default=600, gt=0)
    """One session: generation, tools and reward."""
    control: Seconds = Field(default=120, gt=0)
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
    "compute_teacher_log_probs",
    "compute_values",
    "compute_advantage",
    "update_critic",
    "update_actor",
    "save_snapshot",
    "commit_step",
    "save_checkpoint",
    "update_weights",
    "validate",
)
"""The phases of a step, in their order."""


class RayConfig(Section):
    """The Ray cluster (ours)."""

    address: str | None = None
    """Address of a running cluster, or `auto`; null: a local one that belongs to the run."""
    num_cpus: Cpus = Field(default=16, ge=2)
    """Logical CPUs of the local cluster: places for actors, not cores."""
    num_threads: Threads | None = Field(default=None, ge=1)
    """Threads of tensor maths per process; null: all cores."""
