"""The two sides of a comparison of data: a split of a store, or a log of raw values."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from jaxrank.data import keyed_hash
from jaxrank.data.encode.derive import derive
from jaxrank.data.encode.encoder import Encoder
from jaxrank.data.encode.sequences import list_columns
from jaxrank.data.examples import Examples
from jaxrank.data.files import find, is_local, to_path
from jaxrank.data.rejects import Rejects
from jaxrank.data.sources.registry import make_source
from jaxrank.data.spec.features import FeatureSpec
from jaxrank.data.spec.resolve import resolve_stored
from jaxrank.data.statistics.admission import TableHistory
from jaxrank.data.statistics.split import Statistics
from jaxrank.data.statistics.vocabulary import Vocabulary
from jaxrank.data.store.reader import Store, is_store, open_store
from jaxrank.errors import InputError
from jaxrank.features import Schema

_TRAIN = "train"
_LOG = "log"  # name of the split of a log
_LOG_ENDS = (".parquet", ".csv", ".tsv")  # of the names of its files


class Side(NamedTuple):
    """Data to compare.

    blocks: reads all examples. It is called once.
    statistics: as in a manifest; see `Statistics.summary`. Of a log only after all blocks.
    values: returns the vocabulary of a table, without reserved rows.
    history: returns what a store remembers of a table beside it, such as the ids that wait for a
        row. None: nothing, or the side is a log.
    waiting_from: of a log, the first row that stands for an id that has none but waits for one in
        the store, by table. Ids that neither have a row nor wait are unknown. Tables of stores
        that do not record waiting ids are absent.
    """

    path: str
    schema: Schema
    hash_key: str
    blocks: Callable[[], Iterator[Examples]]
    statistics: Callable[[], Mapping[str, Any]]
    values: Callable[[str], pa.ChunkedArray]
    history: Callable[[str], TableHistory | None] = lambda table: None
    waiting_from: Mapping[str, int] = MappingProxyType({})


def open_side(path: str, split: str, flag: str) -> tuple[Side, Store]:
    """Opens a split of a store.

    Args:
        split: its name. Empty: "train", or the only one.
        flag: of the split, for messages.

    Raises:
        InputError: there is no such store or split.
    """
    store = open_store(path)
    kinds = {name.partition("/")[0] for name in store.splits}
    if not split and _TRAIN not in kinds and len(kinds) > 1:
        raise InputError(f"{flag}: must name a split of {path}: found none, of {sorted(kinds)}.")
    chosen = store.split(split or (_TRAIN if _TRAIN in kinds else min(kinds)), flag)
    side = Side(
        path=str(chosen.path),
        schema=store.schema,
        hash_key=store.spec.hash_key,
        blocks=chosen.blocks,
        statistics=lambda: chosen.statistics,
        values=store.values,
        history=store.history,
    )
    return side, store


def is_log(path: str) -> bool:
    """Returns True if a path names files of raw values and no store."""
    return not is_store(path) and _file_kind(path) != ""


def _file_kind(path: str) -> str:
    ends = _ends(path)
    return "parquet" if ".parquet" in ends else "csv" if ends else ""


def _ends(path: str) -> set[str]:
    """Returns the ends of names in a path, or else of the files in a local directory."""
    names = [path.lower()]
    ends = {end for end in _LOG_ENDS if end in names[0]}
    if not ends and is_local(path) and to_path(path).is_dir():
        names = [to_path(name).name.lower() for name in find(path)]
        ends = {end for end in _LOG_ENDS if any(end in name for name in names)}
    return ends


def log_side(path: str, store: Store, hash_key_file: str) -> Side:
    """Reads a log of raw values as `prepare` would with the encoders of a store.

    Labels and kept columns are not read. Derived columns that the log has are read as they are.

    Args:
        path: Parquet or CSV files: a path, URL, directory or glob.
        hash_key_file: the key of a store with keyed hashes. Empty: none.

    Raises:
        InputError: a column of a feature is absent, or the key is another one.
    """
    key = keyed_hash.read_key(hash_key_file) if hash_key_file else None
    if (keyed_hash.fingerprint(key) if key else "") != store.spec.hash_key:
        raise InputError(
            f"--hash-key-file: must be the key that {store.path} was prepared with, if there was"
            f" one: found {hash_key_file or 'none'}."
        )
    spec = FeatureSpec.from_state(store.spec.features)
    time = spec.time if any(sequence.time for sequence in spec.sequences) else ""
    features = dataclasses.replace(
        resolve_stored(spec, store.schema, store.schema).without_labels(),
        keep=(), time=time, group="", by_day=False,
    )  # fmt: skip
    section = _section(path, store.spec.source)
    features = _without_logged(section, features)
    statistics = Statistics(features)
    tables = [t for t in store.schema.tables if t.encoding == "vocabulary"]
    encoder = Encoder(
        features,
        {t.name: _with_waiting(store, t.name) for t in tables},
        {name: (mean, std) for name, (mean, std) in store.spec.transforms.items()},
        statistics,
        boundaries={name: np.asarray(b, np.float64) for name, b in store.spec.boundaries.items()},
        pseudonymise=keyed_hash.pseudonymise(key) if key else None,
    )
    return Side(
        path=path,
        schema=store.schema,
        hash_key=store.spec.hash_key,
        blocks=lambda: _encoded(section, features, encoder),
        statistics=statistics.summary,
        values=store.values,
        waiting_from={t.name: t.rows for t in tables if t.name in store.histories},
    )


def _with_waiting(store: Store, table: str) -> Vocabulary:
    """Returns the values of a table and behind them those that wait for a row."""
    values, counts = store.vocabulary(table)
    parts, history = [pa.array(values, pa.string())], store.history(table)
    if history is not None:
        parts += history.waiting["value"].cast(pa.string()).chunks
        counts = np.concatenate([counts, history.waiting["count"].to_numpy()])
    return Vocabulary(pa.concat_arrays(parts), counts)


def _without_logged(section: Mapping[str, Any], features: FeatureSpec) -> FeatureSpec:
    """Leaves out the derived columns that a log has, whose values serving computed."""
    columns = make_source(section).columns(_LOG)
    derived = tuple(entry for entry in features.derived if entry.name not in columns)
    return dataclasses.replace(features, derived=derived)


def _section(path: str, source: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a section `source` that reads a log, as text is delimited in the store's source."""
    kind = _file_kind(path)
    section = dict(source) if source.get("kind") == kind else {"kind": kind}
    if kind == "csv" and ".tsv" in _ends(path):
        section.setdefault("delimiter", "\t")
    return section | {"files": {_LOG: path}}


def _encoded(
    section: Mapping[str, Any], features: FeatureSpec, encoder: Encoder
) -> Iterator[Examples]:
    source = make_source(section, features.named)
    columns = source.columns(_LOG)
    derived = {entry.name for entry in features.derived}
    needed = [e.column for e in features.dense] + [e.name for e in features.categorical]
    needed += [*list_columns(features), *(e.weights for e in features.ragged if e.weights)]
    needed += [name for entry in features.derived for name in entry.columns]
    for name in needed:
        if name not in columns and name not in derived:
            raise InputError(
                f"{section['files'][_LOG]}: must have the column {name!r}, which a feature of the"
                f" store reads: found the columns {columns}."
            )
    rejects = Rejects()
    for part in source.parts(_LOG):
        for chunk in source.chunks(part, rejects):
            if features.derived:
                chunk = derive(features.derived, chunk, features.time_format)
            yield encoder.encode(chunk)
