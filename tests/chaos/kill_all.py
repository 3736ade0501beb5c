"""Kill every kind of process in every phase of a step, and print what became of the run.

    python tests/chaos/kill_all.py [--kinds executor driver ...]

One run per kind, with a critic and a reference: in step N the kind is killed at the beginning of
phase N. Attempts that end are continued. The weights at the end are compared, bit for bit, with
those of a run that nobody disturbed. Takes about 20 minutes on 2 cores.
"""

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
USER_CODE = TESTS / "integration" / "user_code"
sys.path[:0] = [str(TESTS / "support"), str(USER_CODE)]

PHASES = (
    "add_batch_to_generate", "sample_batch", "sleep_replicas", "compute_reward", "balance_batch",
    "compute_old_log_probs", "compute_ref_log_probs", "compute_values", "compute_advantage",
    "update_critic", "update_actor", "save_snapshot", "commit_step", "update_weights",
)  # fmt: skip
COMMON = (
    f"trainer.total_training_steps={len(PHASES)}",
    "trainer.total_epochs=4",
    "trainer.val_before_train=False",
    "trainer.test_freq=-1",
    "trainer.save_freq=-1",
    "trainer.logger=[file]",
    "trainer.user_modules=[chaos_mode.py]",
    "trainer.v1.trainer_mode=chaos",
    "actor_rollout_ref.rollout.full_determinism=True",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "algorithm.adv_estimator=gae",
    "seed=5",
)
MAX_ATTEMPTS = 2 * len(PHASES)
RUN_S = 900.0


def train(project, name, plan):
    """Train with strikes until an attempt finishes; return the run folder and the last output."""
    folder = project.root / name
    folder.mkdir()
    (folder / "chaos.json").write_text(json.dumps(plan))
    for _ in range(MAX_ATTEMPTS):
        code, text = project.run(
            "train", "grpo-tiny", *COMMON, f"trainer.max_attempts={MAX_ATTEMPTS}",
            f"trainer.runs_root={project.root / 'all'}", f"trainer.default_local_dir={folder}",
            timeout_s=RUN_S,
        )  # fmt: skip
        if code == 0:
            break
    return folder, text


def became(folder):
    """Return per phase what followed the strike: the same attempt, a new one, or nothing."""
    attempts = json.loads((folder / "run.json").read_text())["attempts"]
    begins = [attempt["began"] for attempt in attempts]
    struck = {}
    for step, phase in enumerate(PHASES, start=1):
        marker = folder / f"struck-{step}-{phase}"
        if marker.exists():
            at = marker.stat().st_mtime
            struck[phase] = sum(begin <= at for begin in begins)
    later = [*list(struck.values())[1:], len(attempts)]
    new = {
        phase: after > number for (phase, number), after in zip(struck.items(), later, strict=True)
    }
    return ["new attempt" if new[p] else "goes on" if p in new else "NOT KILLED" for p in PHASES]


def is_same(folder, reference):
    """Whether two runs have the same weights, bit for bit."""
    files = [f / "model" / "model.safetensors" for f in (folder, reference)]
    return files[0].exists() and files[0].read_bytes() == files[1].read_bytes()


def main():
    """Print the table of kinds and phases."""
    from chaos_mode import KINDS
    from real_parts.processes import end_groups, start_ray_head
    from real_parts.project import Project

    from rlcore.data.prepare import prepare_tiny

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="*", default=KINDS, choices=KINDS)
    kinds = parser.parse_args().kinds
    is_good = True
    with tempfile.TemporaryDirectory() as home:
        root = Path(home) / "p"
        prepare_tiny(root)
        (root / "tmp").mkdir()
        shutil.copy(USER_CODE / "chaos_mode.py", root)
        ray, address = start_ray_head(Path(home), Project(root).environment(), num_cpus=8)
        try:
            joins = (f"ray.address={address}",)
            project = Project(root, joins=joins, variables={"HOME": home})
            reference, text = train(project, "undisturbed", [])
            if not (reference / "model").exists():
                sys.exit(f"the undisturbed run failed:\n{text[-4000:]}")
            rows = {}
            for kind in kinds:
                plan = [(step, phase, kind) for step, phase in enumerate(PHASES, start=1)]
                folder, text = train(project, kind.replace(" ", "-"), plan)
                same = is_same(folder, reference)
                rows[kind] = [*became(folder), "same" if same else "DIFFERENT"]
                is_good &= same and "NOT KILLED" not in rows[kind]
                print(f"{kind}: {rows[kind]}", flush=True)
                if not same:
                    print(text[-4000:], flush=True)
        finally:
            end_groups([ray])
    print("| killed at the beginning of | " + " | ".join(rows) + " |")
    print("|---" * (len(rows) + 1) + "|")
    for number, phase in enumerate((*PHASES, "weights at the end")):
        print(f"| {phase} | " + " | ".join(row[number] for row in rows.values()) + " |")
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()
