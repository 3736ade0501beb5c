"""The steps of one retraining; flows/retrain.py calls them in order."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from prefect.events import emit_event

from rlcore.config import RunConfig, load_config
from rlcore.data.check import check_data
from rlcore.errors import CheckpointError, ConfigError
from rlcore.retraining.gate import Comparison, compare
from rlcore.retraining.promotion import PromotedStore
from rlcore.retraining.snapshot import Snapshot, freeze_evaluation, take_snapshot
from rlcore.trainer.checkpoint import CheckpointStore
from rlcore.trainer.run_folder import RunFolder
from tasks.lineage import git_commit, record_lineage
from tasks.retraining import (
    outcomes_of,
    remember_outcomes,
    remembered_outcomes,
    run_to_its_end,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RetrainRequest:
    """The parameters of flows.retrain.retrain, which says what each means."""

    files: list[str]
    preset: str
    overrides: dict[str, Any]
    start_from: str
    run: str | None
    replay_fraction: float
    min_gain: float
    alpha: float
    root: str
    store: str
    train_with: str
    evaluate_with: str
    deadline_s: float

    def as_parameters(self) -> dict[str, Any]:
        """Return them as a flow takes them."""
        return asdict(self)


class Retraining:
    """One retraining.

    Raises:
        ConfigError: the preset cannot be run, or start_from and run do not fit.
    """

    def __init__(self, request: RetrainRequest) -> None:
        self.request = request
        self.root = Path(request.root)
        self.config: RunConfig = load_config(request.preset, request.overrides)
        self.store = PromotedStore(request.store)
        if (request.start_from == "run") != (request.run is not None):
            raise ConfigError(
                f"start_from={request.start_from} with run={request.run}: name a run with "
                "start_from=run, and only then"
            )

    @property
    def base(self) -> str:
        """Return the folder of the base model."""
        return self.config.actor_rollout_ref.model.path

    def snapshot(self) -> Snapshot:
        """Freeze the evaluation set, or check that it is the same, and write the new rows."""
        evaluation = freeze_evaluation(self.root, self.config.data.val_files)
        return take_snapshot(
            self.root,
            self.request.files,
            evaluation,
            replay_fraction=self.request.replay_fraction,
            prompt_key=self.config.data.prompt_key,
        )

    def start_model(self) -> str:
        """Return the folder of the model that training starts from.

        Raises:
            CheckpointError: the run named has no exported model.
        """
        if self.request.start_from == "run":
            return str(self._model_of(str(self.request.run)))
        if self.request.start_from == "promoted":
            promoted = self.store.model_path(self.root / "models")
            return str(promoted) if promoted is not None else self.base
        return self.base

    def _model_of(self, run_id: str) -> Path:
        model = self.config.run_folder(run_id) / "model"
        if not (model / "config.json").is_file():
            raise CheckpointError(f"run {run_id} has no exported model ({model})")
        return model

    def training_overrides(self, snapshot: Snapshot) -> dict[str, Any]:
        """Return what the training is asked for over the preset."""
        return {
            **self.request.overrides,
            "data.train_files": [str(snapshot.train_file)],
            "data.val_files": [str(self.root / "evaluation" / "test.parquet")],
            "actor_rollout_ref.model.path": self.start_model(),
            "trainer.experiment_name": f"retrain-{snapshot.data_hash[:8]}",
        }

    def validate(self, snapshot: Snapshot) -> None:
        """Check the training's configuration and read all of its data.

        Raises:
            ConfigError, DataError: what is wrong, with file and row.
        """
        check_data(load_config(self.request.preset, self.training_overrides(snapshot)))

    async def train(self, snapshot: Snapshot) -> str:
        """Train in rollflow-train; return the candidate: the id of the run."""
        return await run_to_its_end(
            self.request.train_with,
            {"preset": self.request.preset, "overrides": self.training_overrides(snapshot)},
            key=f"retrain-{self.root.resolve()}-{snapshot.data_hash}",
            config=self.config,
            deadline_s=self.request.deadline_s,
        )

    async def evaluate(self, candidate: str, snapshot: Snapshot) -> list[Comparison]:
        """Compare the candidate with base and promoted model on the frozen evaluation set."""
        others = {"base": (f"base-{self.base}", self.base)}
        promoted = self.store.current()
        if promoted is not None:
            path = self.store.model_path(self.root / "models")
            others["promoted"] = (promoted.candidate, str(path))
        model = str(self._model_of(candidate))
        mine = await self._outcomes(candidate, model, snapshot)
        comparisons: list[Comparison] = []
        for against, (name, folder) in others.items():
            theirs = await self._outcomes(name, folder, snapshot)
            comparisons.append(
                compare(
                    mine,
                    theirs,
                    against=against,
                    min_gain=self.request.min_gain,
                    alpha=self.request.alpha,
                )
            )
        return comparisons

    async def _outcomes(self, name: str, model: str, snapshot: Snapshot) -> dict[str, float]:
        known = remembered_outcomes(self.root, snapshot.evaluation_hash, name)
        if known is not None:
            return known
        overrides = {
            **self.request.overrides,
            "data.val_files": [str(self.root / "evaluation" / "test.parquet")],
        }
        run_id = await run_to_its_end(
            self.request.evaluate_with,
            {"model": model, "preset": self.request.preset, "overrides": overrides},
            key=f"evaluate-{self.root.resolve()}-{snapshot.evaluation_hash}-{name}",
            config=self.config,
            deadline_s=self.request.deadline_s,
        )
        found = outcomes_of(self.config.run_folder(run_id))
        remember_outcomes(self.root, snapshot.evaluation_hash, name, found)
        return found

    async def record(
        self, candidate: str, snapshot: Snapshot, comparisons: list[Comparison]
    ) -> None:
        """Write the candidate's lineage."""
        folder = RunFolder.open(self.config.run_folder(candidate))
        checkpoint = CheckpointStore(folder).latest()
        await record_lineage(
            self.root,
            candidate,
            run_folder=str(folder.path),
            data_hash=snapshot.data_hash,
            data_files=list(snapshot.files),
            num_new=snapshot.num_new,
            num_replayed=snapshot.num_replayed,
            num_held_out=snapshot.num_held_out,
            evaluation_hash=snapshot.evaluation_hash,
            start_from=f"{self.request.start_from}: {self.start_model()}",
            config=str(folder.path / "config.json"),
            git_commit=await git_commit(Path.cwd()),
            checkpoint=str(checkpoint.path) if checkpoint else None,
            evaluation=[comparison.line() for comparison in comparisons],
        )

    def announce(self, candidate: str, snapshot: Snapshot, comparisons: list[Comparison]) -> None:
        """Emit `rollflow.candidate.ready`, with what `promote` needs."""
        emit_event(
            event="rollflow.candidate.ready",
            resource={
                "prefect.resource.id": f"rollflow.candidate.{candidate}",
                "prefect.resource.name": candidate,
            },
            payload={
                "candidate": candidate,
                "model": str(self._model_of(candidate)),
                "data_hash": snapshot.data_hash,
                "root": str(self.root),
                "store": self.request.store,
                "evaluation": [asdict(comparison) for comparison in comparisons],
            },
        )
