"""A folder that `datasets` 4.0.0 wrote by save_to_disk (`saved_dataset/`, two shards)."""

import shutil
from pathlib import Path

from rlcore.data.check import check_data
from rlcore.data.dataset import load_dataset

# `Dataset.from_list(rows).select([3, 1, 2, 5, 7, 8, 0, 11, 10]).save_to_disk(..., num_shards=2)`
FOLDER = Path(__file__).parent / "saved_dataset"
ORDER = [3, 1, 2, 5, 7, 8, 0, 11, 10]


def test_its_rows_are_read_in_order_over_all_shards(make_config):
    config = make_config(data__train_files=str(FOLDER))
    dataset = load_dataset(config, "train")
    texts = [dataset.row(i)["raw_prompt"][0]["content"] for i in range(len(dataset))]
    assert texts == [f"saved {i}" for i in ORDER]
    assert dataset.row(4)["extra_info"] == {"index": 7}
    assert dataset.origin(8) == f"{FOLDER} row 8"
    report = check_data(make_config(data__train_files=str(FOLDER), trainer__total_epochs=2))
    assert (report.num_train, report.steps_per_epoch) == (9, 2)


def test_one_split_of_several_is_named_by_its_folder(make_config, tmp_path):
    for split in ("train", "test"):
        shutil.copytree(FOLDER, tmp_path / "both" / split)
    (tmp_path / "both" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    config = make_config(data__train_files=[str(tmp_path / "both" / "train")])
    assert len(load_dataset(config, "train")) == 9
