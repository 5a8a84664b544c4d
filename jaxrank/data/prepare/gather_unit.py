"""Brings the examples of each request together, after all units have been encoded.

Each unit has divided its examples into buckets by the hash of the request; see `Scatter`. The
buckets are the units of this pass. A bucket is sorted by hash, and the examples of a request stay
in the order of the raw data. Its blocks hold whole requests. The result does not depend on the
number of processes. Memory: about three times the examples of one bucket.
"""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash

from jaxrank import json_files
from jaxrank.data import files
from jaxrank.data.examples import Examples, request_starts
from jaxrank.data.examples import gather as gather_examples
from jaxrank.data.prepare.encode_unit import blocks_directory
from jaxrank.data.prepare.settings import PrepareSettings
from jaxrank.data.prepare.units import WorkUnit
from jaxrank.data.statistics.list_lengths import ListLengths
from jaxrank.data.store.file import Readers, StoredFile
from jaxrank.data.store.writer import SCRATCH, SplitWriter

_BUCKET_BYTES = 64 << 20  # of raw data
# Every unit writes a block for every bucket. Data of more than 64 GiB has larger buckets.
_MAX_BUCKETS = 1024
_OPEN_FILES = 64


class Gathered(NamedTuple):
    """The gathered examples of a split, or of a day of it.

    files: entries of the manifest.
    lengths: of the lists in stored order.
    sizes: number of requests of each number of examples, as i64.
    """

    files: list[dict[str, Any]]
    lengths: ListLengths
    sizes: np.ndarray


def number_of_buckets(units: Sequence[WorkUnit]) -> int:
    """Returns the number of buckets of the requests of a split."""
    size = sum(unit.bytes for unit in units)
    return min(_MAX_BUCKETS, max(1, math.ceil(size / _BUCKET_BYTES)))


def units_of_buckets(split: str, units: Sequence[WorkUnit], buckets: int) -> list[WorkUnit]:
    """Returns the buckets of a split as units."""
    size = sum(unit.bytes for unit in units) // buckets
    return [WorkUnit(split, bucket, (), size, ()) for bucket in range(buckets)]


def write_scattered(
    settings: PrepareSettings, split: str, scattered: Mapping[str, Sequence[Any]]
) -> str:
    """Writes the list of temporary files of a split for `gather`, and returns its checksum.

    Args:
        scattered: by directory, the entries of the files of each encoded unit.
    """
    content = json_files.to_text(scattered, sort_keys=True).encode()
    files.write_whole(_list_path(settings.directory, split), content)
    return xxhash.xxh3_128_hexdigest(content)


@functools.lru_cache(maxsize=1)
def _read_scattered(directory: str, split: str, checksum: str) -> dict[str, list[Any]]:
    del checksum
    return json_files.read(_list_path(directory, split))


def _list_path(directory: str, split: str) -> Any:
    return files.to_path(directory) / SCRATCH / f"scattered-{split}.json"


def gather(settings: PrepareSettings, unit: WorkUnit, scattered: str, buckets: int) -> None:
    """Writes the blocks of one bucket, unless they exist. `read_gathered` describes them.

    Args:
        scattered: the result of `write_scattered`.
        buckets: number of buckets.
    """
    path, fingerprint = _result_path(settings, unit), settings.fingerprint(unit, scattered, buckets)
    if path.is_file():
        if _is_written(settings, path, fingerprint):
            return
        files.remove(path)  # its files are about to be overwritten
    splits = {}
    listed = _read_scattered(settings.directory, unit.split, scattered)
    for directory, units in listed.items():
        parts = list(_bucket(settings, directory, units, unit.index, buckets))
        if parts:
            splits[directory] = _write(settings, directory, unit, parts)
    path.parent.mkdir(parents=True, exist_ok=True)
    tree = {"splits": splits, "fingerprint": fingerprint}
    files.write_whole(path, json_files.to_text(tree).encode())


def read_gathered(settings: PrepareSettings, units: Sequence[WorkUnit]) -> dict[str, Gathered]:
    """Returns the results of all buckets of a split, by directory."""
    lists = len(settings.features.ragged)
    results: dict[str, Gathered] = {}
    for unit in units:
        for directory, entry in json_files.read(_result_path(settings, unit))["splits"].items():
            before = results.get(directory, Gathered([], ListLengths(lists), np.zeros(1, np.int64)))
            before.lengths.merge(ListLengths.from_state(entry["list_lengths"]))
            sizes = np.zeros(max(len(before.sizes), len(entry["sizes"])), np.int64)
            for part in (before.sizes, entry["sizes"]):
                sizes[: len(part)] += part
            results[directory] = Gathered([*before.files, *entry["files"]], before.lengths, sizes)
    return results


def lines(gathered: Mapping[str, Gathered], column: str) -> list[str]:
    """Describes the requests of a split."""
    counts = [entry.sizes for entry in gathered.values()]
    requests = sum(int(sizes.sum()) for sizes in counts)
    largest = max((len(sizes) - 1 for sizes in counts), default=0)
    rows = sum(int((sizes * np.arange(len(sizes))).sum()) for sizes in counts)
    mean = rows / max(requests, 1)
    return [
        f"{requests:,} requests by {column}, {mean:.1f} examples on average, {largest:,} at most"
    ]


def _result_path(settings: PrepareSettings, unit: WorkUnit) -> Any:
    return files.to_path(settings.directory) / SCRATCH / f"gathered-{unit.split}-{unit.name}.json"


def _is_written(settings: PrepareSettings, path: Any, fingerprint: str) -> bool:
    try:
        tree = json_files.read(path)
        return tree["fingerprint"] == fingerprint and all(
            (files.to_path(settings.directory) / directory / file["name"]).stat().st_size
            == file["bytes"]
            for directory, entry in tree["splits"].items()
            for file in entry["files"]
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False  # written by another version, or incomplete


def _bucket(
    settings: PrepareSettings,
    directory: str,
    units: Sequence[Sequence[Mapping[str, Any]]],
    bucket: int,
    buckets: int,
) -> Iterator[Examples]:
    """Yields the examples of a bucket in the order of the raw data."""
    folder, readers = blocks_directory(settings) / directory, Readers(_OPEN_FILES)
    for entries in units:
        number = 0
        for entry in entries:
            file = StoredFile(folder / entry["name"], entry, readers)
            for position, block in enumerate(entry["blocks"]):
                if number % buckets == bucket and block["rows"]:
                    yield file.read_block(position)
                number += 1


def _write(
    settings: PrepareSettings, directory: str, unit: WorkUnit, parts: Sequence[Examples]
) -> dict[str, Any]:
    """Writes the sorted examples of a bucket, and returns their entry of the result."""
    hashes = np.concatenate([p.requests[:, 0] for p in parts if p.requests is not None])
    order = np.argsort(hashes, kind="stable")
    starts = request_starts(hashes[order])
    path = files.to_path(settings.directory) / directory
    writer = SplitWriter(path, unit.name, settings.compression)
    lengths = ListLengths(len(settings.features.ragged))
    for start, stop in _blocks(starts, len(order), settings.block_size):
        examples = gather_examples(parts, order[start:stop])
        lengths.add(examples.list_lengths)
        writer.write(examples)
    writer.close()
    sizes = np.bincount(np.diff(np.append(starts, len(order)))).tolist()
    return {"files": writer.files, "list_lengths": lengths.to_state(), "sizes": sizes}


def _blocks(starts: np.ndarray, rows: int, size: int) -> Iterator[tuple[int, int]]:
    """Yields blocks of whole requests of at most `size` examples, or of one larger request."""
    ends = np.append(starts[1:], rows)
    start = 0
    while start < rows:
        fitting = int(np.searchsorted(ends, start + size, side="right"))
        # The request that begins at `start` is always part of the block.
        first = int(np.searchsorted(ends, start, side="right"))
        stop = int(ends[max(fitting - 1, first)])
        yield start, stop
        start = stop
