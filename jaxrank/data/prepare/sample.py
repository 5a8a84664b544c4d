"""Reports what the first records of the training data seem to mean without a field that says so.

These are notes and not errors, because the values may be intended.
"""

import itertools
import re
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from jaxrank.data import files
from jaxrank.data.chunk import Chunk
from jaxrank.data.encode.brackets import lists
from jaxrank.data.encode.cells import id_elements, list_elements
from jaxrank.data.encode.columns import MISSING_WORDS, is_list, is_text, read_column
from jaxrank.data.encode.times import other_form
from jaxrank.data.rejects import Rejects
from jaxrank.data.sources.registry import Source
from jaxrank.data.spec.entries import CALENDAR_FORMS, CategoricalSpec, RaggedSpec
from jaxrank.data.spec.features import FeatureSpec
from jaxrank.data.statistics.report import forms_line
from jaxrank.errors import InputError

_FRACTION = r"-?[0-9]*\.[0-9]+([eE]-?[0-9]+)?%?"
_BEHIND = "end in a separator and a number"
_WITH_FRACTION_BEHIND = rf"^.+[:=^#;@~]{_FRACTION}$"
# Patterns of ids with weights, the share of ids from which a pattern is reported, and its meaning.
_WEIGHTED = (
    (r"^.+[:=^#;@~]-?[0-9]*\.?[0-9]+([eE]-?[0-9]+)?%?$", 0.5, _BEHIND),
    (_WITH_FRACTION_BEHIND, 0.1, _BEHIND),
    (rf"^.*[^ _(][ _(]{_FRACTION}\)?$", 0.5, _BEHIND),
    (rf"^{_FRACTION}[:=^#;@~].+$", 0.5, "begin with a number and a separator"),
)
# As a float column writes ids: with an exponent, which drops digits, or with a fraction of zero.
_ROUNDED = r"^-?[0-9]\.?[0-9]*[eE]\+?[0-9]+$"
_NUMBER = r"^-?[0-9]*\.[0-9]*[1-9][0-9]*$"
_WITH_FRACTION = r"^-?[0-9]+\.0*$"
# Texts that separate ids, and the pattern of ids that contain one. Names have spaces and slashes.
_SEPARATORS = {s: re.escape(s) for s in ("|", ",", ";", "\t", "\x01", "\x02", "\x1d")}
_SEPARATORS |= {s: rf"^[0-9]+({s}[0-9]+)+$" for s in (" ", "/")}
_IN_CELLS = ("|", "\t", "\x01", "\x02", "\x1d")  # separators that single ids hardly contain
# As a program prints values, and spaces of Unicode, which are not seen.
_PRINTED = r"""^([bBuU]?'[^']*'|[bBuU]?"[^"]*"|(np|numpy)\.\w+\(.*\))$"""
_SPACED = r"^[\s\pZ\x{200b}\x{feff}]|[\s\pZ\x{200b}\x{feff}]$"
_NULLS = "list them in source.null_values (csv), or write null"
_MAX_SHOWN_VALUES = 3
_OWN_VALUES = {"-", "?", "missing", "undefined", "unknown"}  # also used as ordinary values


def notes(features: FeatureSpec, data: Source, split: str) -> list[str]:
    """Returns a line for each feature whose values do not look like ids."""
    chunk = _first_chunk(data, split)
    if chunk is None:
        return []
    entries: list[CategoricalSpec | RaggedSpec] = [*features.categorical, *features.ragged]
    lines = [line for entry in entries for line in _entry_values(entry, chunk)]
    lines += [line for where, name in _ids(features) for line in _other_ids(where, name, chunk)]
    if not features.time_format:
        lines += [line for name in _times(features) for line in _other_times(name, chunk)]
    return lines


def shared_files(data: Source) -> list[str]:
    """Returns a line for each pair of splits that share a file."""
    if not data.files:
        return []
    paths = {split: {part.file for part in data.parts(split)} for split in data.splits}
    paths_by_file = {
        split: {files.identify(p): p for p in listed} for split, listed in paths.items()
    }
    lines = []
    for a, b in itertools.combinations(paths_by_file, 2):
        if both := paths_by_file[a].keys() & paths_by_file[b].keys():
            first = min(paths_by_file[a][key] for key in both)
            lines.append(
                f"{first}: this file is in the splits {a} and {b} ({len(both)} such file(s) in"
                " total), so metrics of one split are not held out from the other"
            )
    return lines


def _ids(features: FeatureSpec) -> Iterator[tuple[str, str]]:
    """Yields the columns whose values are ids without being a feature's, and what reads them."""
    if features.group:
        yield "group", features.group
    for entry in features.derived:
        if entry.kind == "cross":
            yield from ((f"cross {entry.name}", name) for name in entry.columns)


def _other_ids(where: str, name: str, chunk: Chunk) -> Iterator[str]:
    values = _texts(name, chunk)
    if values is None:
        return
    where = f"{where}, column {name}"
    yield from _describe_floats(where, values)
    yield from _describe_words(where, values, _NULLS)
    listed = pa.array(lists(values))
    if share := _share(listed):
        yield (
            f"{where}: {share:.1%} of the first {len(values):,} values are lists in brackets, such"
            f" as {values.filter(listed)[0].as_py()!r}, each of which is one id"
        )


def _times(features: FeatureSpec) -> list[str]:
    names = [features.time, *(task.time for task in features.tasks)]
    of_kinds = ("hour", "weekday", "age")
    names += [c for entry in features.derived if entry.kind in of_kinds for c in entry.columns]
    return [name for name in dict.fromkeys(names) if name]


def _other_times(name: str, chunk: Chunk) -> Iterator[str]:
    try:
        form = other_form(read_column(chunk, name))
    except InputError:
        return
    if form:
        way = f"set features.time_format={form!r}"
        if form not in CALENDAR_FORMS:
            way = "write them as text such as 2024-05-01 12:00"
        yield (
            f"column {name}: all times of the first {chunk.batch.num_rows:,} rows that are read as"
            f" seconds since 1970 could be dates as {form}. If they are dates, {way}. Set"
            " features.time_format='seconds' if they are not"
        )


def _texts(name: str, chunk: Chunk) -> pa.Array | None:
    """Returns the values of a column of the raw data that is text, without missing ones."""
    if name not in chunk.batch.schema.names:
        return None  # derived
    try:
        values = read_column(chunk, name).values.drop_null()
    except InputError:
        return None
    return values if is_text(values.type) and len(values) else None


def _first_chunk(data: Source, split: str) -> Chunk | None:
    try:
        return next(iter(data.chunks(data.parts(split)[0], Rejects("skip", 1 << 30))), None)
    except InputError:
        return None  # reported when the records are read in full


def _entry_values(entry: CategoricalSpec | RaggedSpec, chunk: Chunk) -> Iterator[str]:
    if entry.encoding not in ("vocabulary", "hash"):
        return  # accepts only integers
    try:
        if isinstance(entry, RaggedSpec):
            cells = list_elements(entry, chunk).ids
        else:
            cells = id_elements(entry, chunk)
    except InputError:
        return
    values = cells.values.drop_null()
    if not is_text(values.type) or not len(values):
        return
    yield from _describe_weights(entry, values)
    kind = chunk.batch.schema.field(entry.name).type
    yield from _describe_lists(entry, values, is_list(kind))
    where, count = f"feature {entry.name}", f"the first {len(values):,}"
    share, example = _matching(values, _SPACED)
    if share > 0:
        yield (
            f"{where}: {share:.1%} of {count} values begin or end with a space, such as"
            f" {example!r}, which makes them different values. If the space belongs to the"
            " separator, include it in `separator`"
        )
    share, example = _matching(values, _PRINTED)
    if share > 0.5 and entry.brackets != "keep":
        yield (
            f"{where}: {share:.0%} of {count} values are as a program prints them, such as"
            f" {example!r}. Write the ids themselves, or set brackets='keep' where quotes are parts"
            " of ids"
        )
    share, example = _matching(values, _NUMBER)
    if share > 0.5:
        yield (
            f"{where}: {share:.0%} of {count} ids are numbers with a fraction, such as"
            f" {example!r}. If they are amounts, name the column in `dense`"
        )
    yield from _describe_floats(where, values)
    if entry.encoding == "hash":  # without a vocabulary, which has all values
        line = forms_line(where, pc.unique(values))
        yield from [line] * bool(line)
    way = "list them in padding"
    if not isinstance(entry, RaggedSpec):
        way = _NULLS
    yield from _describe_words(where, values, way)


def _describe_words(where: str, values: pa.Array, way: str) -> Iterator[str]:
    lower = pc.utf8_lower(pc.utf8_trim_whitespace(values))
    words = pc.is_in(lower, value_set=pa.array(sorted(MISSING_WORDS - _OWN_VALUES)))
    share = _share(words)
    if share > 0:
        texts = pc.unique(values.filter(words)).to_pylist()[:_MAX_SHOWN_VALUES]
        yield (
            f"{where}: {share:.1%} of the first {len(values):,} values are"
            f" {', '.join(map(repr, texts))}, which are read as values. If they mean that a value"
            f" is missing, {way}"
        )


def _describe_weights(entry: CategoricalSpec | RaggedSpec, values: pa.Array) -> Iterator[str]:
    is_ragged = isinstance(entry, RaggedSpec)
    if isinstance(entry, RaggedSpec) and entry.is_weighted:
        return
    # Single ids such as "shoes:42" are common.
    patterns = _WEIGHTED if is_ragged else ((_WITH_FRACTION_BEHIND, 0.5, _BEHIND),)
    for pattern, least, meaning in patterns:
        weighted = pc.match_substring_regex(values, pattern)
        share = _share(weighted)
        if share <= least:
            continue
        example = values.filter(weighted)[0].as_py()
        way = "set" if is_ragged else "name the column in `ragged` with"
        if meaning != _BEHIND:
            way = "write it behind the id and set"
        yield (
            f"feature {entry.name}: {share:.0%} of the first {len(values):,} ids {meaning}, such"
            f" as {example!r}. If the number is a weight, {way} weight_separator"
        )
        return


def _describe_lists(
    entry: CategoricalSpec | RaggedSpec, values: pa.Array, is_list_type: bool
) -> Iterator[str]:
    separators, read = list(_SEPARATORS), [""]
    if isinstance(entry, RaggedSpec):
        read.append(entry.weight_separator)
    elif entry.length == 1:
        separators = list(_IN_CELLS)
    else:
        return
    if not is_list_type:
        read.append(entry.separator)
    for separator in separators:
        contains = pc.match_substring_regex(values, _SEPARATORS[separator])
        if separator in read or _share(contains) <= 0.5:
            continue
        example = values.filter(contains)[0].as_py()
        way = f"set separator={separator!r}"
        if not isinstance(entry, RaggedSpec):
            way = "name the column in `ragged`"
        elif is_list_type:
            way = "write each id as a part of the list, or the column as text"
        yield (
            f"feature {entry.name}: most of the first {len(values):,} ids contain {separator!r},"
            f" such as {example!r}. If it separates ids, {way}"
        )
        return


def _describe_floats(where: str, values: pa.Array) -> Iterator[str]:
    for pattern, meaning in (
        (
            _ROUNDED,
            "numbers with an exponent, such as {!r}. Different ids may have been rounded to one:"
            " write them as whole numbers or as text",
        ),
        (
            _WITH_FRACTION,
            "whole numbers with a fraction, such as {!r}, which differs from the same number"
            " without it: write all days in one form",
        ),
    ):
        matches = pc.match_substring_regex(values, pattern)
        if share := _share(matches):
            example = values.filter(matches)[0].as_py()
            yield (
                f"{where}: {share:.1%} of the first {len(values):,} values are"
                f" {meaning.format(example)}"
            )


def _matching(values: pa.Array, pattern: str) -> tuple[float, str]:
    """Returns the share of texts that match, and the first one, "" if none does."""
    mask = pc.match_substring_regex(values, pattern)
    matches = values.filter(mask)
    return _share(mask), matches[0].as_py() if len(matches) else ""


def _share(mask: pa.Array) -> float:
    return float(pc.mean(mask.cast(pa.int8())).as_py() or 0)
