"""`rollflow check-env`: what the trainer would see of a few sessions, without the model."""

from typing import Any

import typer

from rlcore.errors import RolloutError

PROMPT_STYLE: dict[str, Any] = {"dim": True}
SAMPLED_STYLE: dict[str, Any] = {"fg": typer.colors.GREEN}
CONTEXT_STYLE: dict[str, Any] = {"fg": typer.colors.YELLOW}


def show_environment(config: Any, *, prompts: int, sessions: int, policy: str | None) -> None:
    """Run the sessions and print them.

    Raises:
        ConfigError: the preset cannot be run.
        RolloutError: a session failed.
    """
    from rlcore.agent_loop.check_env import check_environment

    report = check_environment(config, num_prompts=prompts, num_sessions=sessions, policy=policy)
    for notice in report.notices:
        typer.echo(f"note: {notice}")
    typer.secho("prompt ", nl=False, **PROMPT_STYLE)
    typer.secho("sampled: trained on ", nl=False, **SAMPLED_STYLE)
    typer.secho("given: masked", **CONTEXT_STYLE)
    for session in report.sessions:
        _show_session(report.tokenizer, session)
    if report.num_failed:
        raise RolloutError(f"{report.num_failed} of {len(report.sessions)} sessions failed")


def _show_session(tokenizer: Any, session: Any) -> None:
    from rlcore.agent_loop.check_env import pieces

    record = session.result.record
    typer.echo(f"\n--- {session.origin}, session {record.session_id}")
    for row in session.result.rows:
        typer.secho(str(tokenizer.decode(row["prompts"])), nl=False, **PROMPT_STYLE)
        for mask, text in pieces(tokenizer, row):
            typer.secho(text, nl=False, **(SAMPLED_STYLE if mask else CONTEXT_STYLE))
        typer.echo("")
    if record.is_failed:
        typer.secho(f"failed: {record.error_message}", fg=typer.colors.RED)
        return
    lengths = ", ".join(
        f"{len(row['responses'])} response tokens, {int(row['response_mask'].sum())} sampled"
        for row in session.result.rows
    )
    extra = ", ".join(f"{name} {value}" for name, value in record.reward_extra.items())
    times = ", ".join(
        f"{name} {record.metrics[name] * 1000:.1f} ms"
        for name in ("generate_sequences", "tool_calls", "compute_score")
        if name in record.metrics
    )
    typer.echo(f"{lengths}; {record.num_turns} turns; reward {record.reward:g} ({extra})")
    typer.echo(f"{times}, in all {session.total_s * 1000:.1f} ms")
