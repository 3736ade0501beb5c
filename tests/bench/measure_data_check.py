"""Peak memory and speed of reading, checking and measuring a data set, each size in a new process.

`python tests/bench/measure_data_check.py 50000 200000` prints one JSON line per size and format;
`python tests/bench/measure_data_check.py 1000000` is the claim: one million rows within 1 GiB.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

TEXT = "How many marbles does child {} have after giving {} of them away? " * 3
WORDS_OF_ROW = 6


def write_questions(path: Path, first: int, num_rows: int) -> None:
    """Write distinct rows of about 400 bytes, in verl's format, without holding them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    writer = None
    for begin in range(first, first + num_rows, 10_000):
        rows = [
            {
                "data_source": "rollflow/letters",
                "prompt": [{"role": "user", "content": TEXT.format(*[i] * WORDS_OF_ROW)}],
                "reward_model": {"style": "rule", "ground_truth": str(i)},
                "extra_info": {"index": i, "split": "train", "difficulty": i / 7},
            }
            for i in range(begin, min(begin + 10_000, first + num_rows))
        ]
        if path.suffix == ".jsonl":
            with path.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
            continue
        table = pa.Table.from_pylist(rows)
        # One row group for all rows, as `pandas.to_parquet` writes up to a million of them.
        writer = writer or pq.ParquetWriter(path, table.schema)
        writer.write_table(table, row_group_size=1 << 20)
    if writer is not None:
        writer.close()


def peak_mib() -> float:
    """Return the most memory this process held at once.

    Not `getrusage`, whose peak a child takes over from the process that started it.
    """
    status = Path("/proc/self/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) / 1024


def check_in_this_process(model: Path, folder: Path, train: Path) -> dict[str, float]:
    """Run the whole check of a training file; return what it took."""
    import time

    from rlcore.config import load_config
    from rlcore.data.check import check_data

    config = load_config(
        "grpo-tiny",
        {
            "actor_rollout_ref.model.path": str(model),
            "data.train_files": str(train),
            "data.val_files": str(folder / "val.parquet"),
            "data.max_prompt_length": 1024,
            "data.max_response_length": 64,
            "data.cache_dir": str(folder / "cache"),
            "trainer.runs_root": str(folder / "runs"),
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 8192,
        },
    )
    before = peak_mib()
    began = time.monotonic()
    report = check_data(config)
    seconds = time.monotonic() - began
    return {
        "rows": report.num_train,
        "mib_before": round(before, 1),
        "mib_peak": round(peak_mib(), 1),
        "seconds": round(seconds, 1),
        "rows_per_s": round(report.num_train / seconds),
    }


def measure(num_rows: int, *, model: Path, suffix: str = ".parquet") -> dict[str, float]:
    """Measure one size in a process of its own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_questions(folder / f"train{suffix}", 0, num_rows)
        write_questions(folder / "val.parquet", num_rows, 100)
        arguments = [str(model), str(folder), str(folder / f"train{suffix}")]
        done = subprocess.run(
            [sys.executable, __file__, "--child", *arguments],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(done.stderr)
        size = (folder / f"train{suffix}").stat().st_size
        return {**json.loads(done.stdout.splitlines()[-1]), "file_mib": round(size / 2**20, 1)}


def main() -> None:
    """Print one line per size and format."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sizes", nargs="*", default=["50000", "200000"])
    parser.add_argument("--model", default="models/tiny")
    parser.add_argument("--child", action="store_true")
    options = parser.parse_args()
    if options.child:
        print(json.dumps(check_in_this_process(*map(Path, options.sizes))))
        return
    for size in options.sizes:
        for suffix in (".parquet", ".jsonl"):
            found = measure(int(size), model=Path(options.model), suffix=suffix)
            print(json.dumps({"format": suffix, **found}), flush=True)


if __name__ == "__main__":
    main()
