"""What log-probs of a batch tell: entropy, the gap to the engine, how far the teacher is."""

from torch.nn.utils.rnn import pad_sequence

from rlcore.algorithms import masked_mean, offpolicy_metrics, teacher_kl
from rlcore.errors import DataError
from rlcore.training.batches import Rows
from rlcore.training.distillation import TEACHER_COLUMN
from rlcore.training.policy import Policy

COMPARED = ("response_mask", "old_log_probs", "entropy", "rollout_log_probs", TEACHER_COLUMN)


def compared(rows: Rows, columns: Rows) -> Rows:
    """Return those of a batch's columns, and of newly computed ones, that metrics are made of."""
    return {name: value for name, value in {**rows, **columns}.items() if name in COMPARED}


def check_vocabulary(model: Policy, rows: Rows) -> None:
    """Check that a frozen model has a row for every token of the columns.

    Raises:
        DataError: names row, column and token.
    """
    embeddings = model.model.get_input_embeddings()
    num_rows = int(embeddings.num_embeddings)  # type: ignore[arg-type]
    for name in ("prompts", "responses"):
        for row, ids in enumerate(rows[name]):
            if len(ids) and int(ids.max()) >= num_rows:
                raise DataError(
                    f"row {row}: {name} hold token {int(ids.max())}, of which the teacher "
                    f"{model.model.name_or_path} has no row: its vocabulary has {num_rows}"
                )


def teacher_metrics(rows: Rows) -> dict[str, float]:
    """Return the mean KL from the policy to the teacher, nats per token, where both are known."""
    if "old_log_probs" not in rows:
        return {}
    padded = {name: pad_sequence(values, batch_first=True) for name, values in rows.items()}
    kl = teacher_kl(padded["old_log_probs"], padded[TEACHER_COLUMN], padded["response_mask"])
    return {"actor/distillation/teacher_kl": kl}


def policy_metrics(rows: Rows) -> dict[str, float]:
    """Return the entropy and, where the engine's log-probs are known, the gap to them."""
    padded = {name: pad_sequence(rows[name], batch_first=True) for name in rows}
    mask = padded["response_mask"]
    metrics = {"actor/entropy": masked_mean(padded["entropy"], mask).item()}
    if "rollout_log_probs" in padded:
        gap = offpolicy_metrics(padded["old_log_probs"], padded["rollout_log_probs"], mask)
        for name, value in gap.items():
            prefix = "training/rollout_" if "_diff_" in name else "rollout_corr/"  # as verl
            metrics[prefix + name] = value
    return metrics
