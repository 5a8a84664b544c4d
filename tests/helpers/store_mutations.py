"""Reads damaged stores in a separate process, which a reader may crash.

    python tests/helpers/store_mutations.py FIRST COUNT DIRECTORY

Prints the number of each case before it, and finally how many damages of each kind had no effect
and how many were rejected.
"""

import collections
import json
import random
import sys
from pathlib import Path
from unittest import mock

import by_day
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from mutations import mutated

from jaxrank.data.batches.buffers import batch_arrays
from jaxrank.data.batches.pipeline import EvaluationBatches, TrainBatches
from jaxrank.data.prepare.passes import prepare
from jaxrank.data.store import manifest as manifests
from jaxrank.data.store import writer
from jaxrank.data.store.reader import open_store
from jaxrank.errors import InputError
from jaxrank.layout import layout

ROWS = {"train": 120, "valid": 50}
FEATURES = dict(
    tasks=[dict(name="click", label="label", weight="w")],
    dense=[dict(columns="price", missing_indicator=True)],
    categorical=[
        dict(columns="user", encoding="vocabulary"),
        dict(columns="shop", encoding="integer", rows=9),
    ],
    ragged=[
        dict(columns="tags", encoding="vocabulary", weights="tag_weights"),
        dict(columns="seen", encoding="integer", rows=9, combiner="none", max_length=4),
    ],
    keep=["user", "shop"],
)


def table(rows, seed):
    draw = random.Random(seed)
    tags = [[f"t{draw.randrange(7)}" for _ in range(draw.randrange(4))] for _ in range(rows)]
    return pa.table(
        {
            "label": [draw.randrange(2) for _ in range(rows)],
            "w": [draw.random() for _ in range(rows)],
            "price": [draw.choice([None, draw.gauss(0, 1)]) for _ in range(rows)],
            "user": [draw.choice([None, f"u{draw.randrange(9)}"]) for _ in range(rows)],
            "shop": [draw.randrange(9) for _ in range(rows)],
            "tags": tags,
            "tag_weights": [[draw.random() for _ in of_one] for of_one in tags],
            "seen": [[draw.randrange(9)] * draw.randrange(5) for _ in range(rows)],
        }
    )


def write_stores(directory):
    """Prepares small stores of several files per split: default, compressed, and by day."""
    directory = Path(directory)
    files = {}
    for seed, (split, rows) in enumerate(ROWS.items()):
        files[split] = str(directory / f"{split}.parquet")
        pq.write_table(table(rows, seed), files[split])
    days = {f"2024-05-0{i}": table(40, i) for i in (1, 2, 3)}
    with mock.patch.object(writer, "_BLOCKS_PER_FILE", 2):
        stores = [
            prepare(
                FEATURES,
                dict(kind="parquet", files=files),
                directory / f"all{compression}",
                block_size=20,
                compression=compression,
                report=lambda _: None,
            )
            for compression in ("", "zstd", "lz4")
        ]
        stores.append(by_day.write(directory, days, FEATURES, block_size=20))
    return [store.path for store in stores]


def read(path):
    """Reads everything that training and evaluation use of a store, as (dtype, shape, bytes)."""
    store = open_store(path)
    by_days = "train" not in store.splits
    placed = layout(store.schema, {t.name: 4 for t in store.schema.tables})
    train = TrainBatches(
        store.split("train"),
        placed,
        batch_size=16,
        steps_per_execution=2,
        seed=1,
        shards=2,
        window_blocks=2,
        num_workers=0,
        prefetch_batches=0,
        list_slack=8.0,
        on_overflow="error",
        order="days" if by_days else "shuffled",
        num_steps=8,
    )
    valid = store.split("train/2024-05-03" if by_days else "valid")
    result = list(train)
    for batch, rows in EvaluationBatches(valid, placed, batch_size=512, prefetch_batches=0):
        result += [batch, (np.array(rows),)]
    for name in "user", "tags":
        values, counts = store.vocabulary(name)
        result.append((np.array(values), counts))
    for block in valid.blocks():
        result.append(tuple(c.to_numpy(zero_copy_only=False).astype("S") for c in block.kept))
    return [(a.dtype.str, a.shape, a.tobytes()) for batch in result for a in batch_arrays(batch)]


# Damage.

_PATHS = ["../..", "../train", "/", "", ".", "a/b.arrow", "..\\a.arrow", 3, None, ["x"]]
_VALUES = [*_PATHS, True, -1, 0, 2.5, 10**30, -(10**30), 1e308, "x", [], {}, [1]]


def _places(tree, key=None, node=None):
    """Yields (node, key) of each value node[key] in a tree of dicts and lists."""
    if node is not None:
        yield node, key
    if isinstance(tree, dict | list):
        for k in list(tree) if isinstance(tree, dict) else range(len(tree)):
            yield from _places(tree[k], k, tree)


def changed(tree, draw):
    """Replaces, removes, renames or repeats a value in a tree, or reverses a list."""
    part = draw.choice([k for k in tree if k != "splits"] + ["splits"] * 3)
    if part == "splits" and draw.random() < 0.8:  # statistics hold most of the values
        split = tree["splits"][draw.choice(list(tree["splits"]))]
        places = list(_places(split["files"], "files", split))
    else:
        places = list(_places(tree[part], part, tree))
    node, key = draw.choice(places)
    how = draw.choice(["replace", "replace", "remove", "rename", "repeat", "turn"])
    if how == "remove":
        del node[key]
    elif how == "rename" and isinstance(node, dict):
        node[draw.choice(["x", "../..", key + "x"])] = node.pop(key)
    elif how == "repeat" and isinstance(node[key], list):
        node[key] *= 2
    elif how == "turn" and isinstance(node[key], list):
        node[key].reverse()
    else:
        node[key] = draw.choice(_VALUES)


def with_another_path(tree, draw):
    """Renames a split or a file to an existing or an invalid name."""
    name = draw.choice(list(tree["splits"]))
    if draw.random() < 0.5:
        path = draw.choice([p for p in _PATHS if isinstance(p, str)])
        tree["splits"] = {path if n == name else n: e for n, e in tree["splits"].items()}
    else:
        draw.choice(tree["splits"][name]["files"])["name"] = draw.choice(_PATHS)


def damage(path, draw):
    """Damages one or two files of a store, and returns the kind of damage and the files."""
    files = sorted(p for p in Path(path).rglob("*") if p.suffix in (".json", ".arrow"))
    vocabularies = [p for p in files if p.parent.name == "vocabulary"]
    blocks = [p for p in files if p.suffix == ".arrow" and p not in vocabularies]
    manifest = Path(path) / "manifest.json"
    how = draw.choice(
        ["tree", "path", "bytes", "bytes", "bytes", "cut", "empty", "missing", "swap"]
    )
    if how in ("tree", "path"):
        tree = json.loads(manifest.read_text())
        changed(tree, draw) if how == "tree" else with_another_path(tree, draw)
        # With an invalid checksum of the manifest, and with a valid one.
        text = json.dumps(tree, indent=1) if how == "tree" else manifests.SEAL.to_text(tree)
        manifest.write_text(text)
        return how, [manifest]
    file = draw.choice([manifest, draw.choice(vocabularies), draw.choice(blocks)])
    content = file.read_bytes()
    if how == "swap":
        other = draw.choice(vocabularies if file in vocabularies else blocks)
        file.write_bytes(other.read_bytes())
        other.write_bytes(content)
        return how, [file, other]
    if how == "missing":
        file.unlink()
    else:
        known = {"cut": content[: draw.randrange(len(content))], "empty": b""}
        file.write_bytes(known[how] if how in known else mutated(content, draw))
    return how, [file]


def main(first, count, directory):
    paths = write_stores(directory)
    sound = {path: read(path) for path in paths}
    contents = {p: p.read_bytes() for path in paths for p in Path(path).rglob("*") if p.is_file()}
    whole = collections.Counter()
    rejected = collections.Counter()
    for seed in range(int(first), int(first) + int(count)):
        print(seed, flush=True)
        draw = random.Random(seed)
        path = draw.choice(paths)
        how, files = damage(path, draw)
        try:
            assert read(path) == sound[path], f"other numbers, of {files}"
            whole[how] += 1
        except InputError as error:
            # A missing file may be reported as "STORE: ... no manifest.json".
            if not any(str(path) in str(error) and file.name in str(error) for file in files):
                raise
            rejected[how] += 1
        for file in files:
            file.write_bytes(contents[file])
    print(json.dumps({"read": whole, "rejected": rejected}))


if __name__ == "__main__":
    main(*sys.argv[1:])
