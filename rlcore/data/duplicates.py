"""Questions that are there twice: within one data set, or in training and held-out rows."""

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from rlcore.data.store import META, RowStore

MAX_LISTED = 5


def find_duplicates(folder: Path) -> None:
    """Write into the store's meta.json how many rows repeat an earlier row's question."""
    store = RowStore(folder)
    listed: list[list[str]] = []
    count = 0
    for later, earlier in repeated_rows(store):
        count += 1
        if len(listed) < MAX_LISTED:
            listed.append([store.origin(later), store.origin(earlier)])
    if count:
        meta = replace(store.meta, duplicates=listed, num_duplicates=count)
        (folder / META).write_text(json.dumps(asdict(meta)), encoding="utf-8")


def repeated_rows(store: RowStore) -> Iterator[tuple[int, int]]:
    """Yield (row, first row with the same question) for every row that repeats one."""
    digests = store.questions()
    order = np.argsort(digests, kind="stable")
    same = np.flatnonzero(digests[order][1:] == digests[order][:-1]) + 1
    first = -1
    for place in same:
        row, before = int(order[place]), int(order[place - 1])
        if first < 0 or digests[first] != digests[row]:
            first = before
        # Equal digests are a hint; the texts decide.
        if store.question(row) == store.question(first):
            yield row, first


def shared_rows(train: RowStore, val: RowStore) -> Iterator[tuple[int, int]]:
    """Yield (training row, held-out row) for every held-out question that is trained on."""
    train_digests, val_digests = train.questions(), val.questions()
    order = np.argsort(train_digests, kind="stable")
    ordered = train_digests[order]
    places = np.searchsorted(ordered, val_digests)
    for val_row in np.flatnonzero(places < len(ordered)):
        place = int(places[val_row])
        if ordered[place] != val_digests[val_row]:
            continue
        train_row = int(order[place])
        if train.question(train_row) == val.question(int(val_row)):
            yield train_row, int(val_row)
