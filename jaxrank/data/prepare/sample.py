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
from jaxrank.data.encode.cells import id_elements, list_elements
from jaxrank.data.encode.columns import MISSING_WORDS, is_list, is_text
from jaxrank.data.rejects import Rejects
from jaxrank.data.sources.registry import Source
from jaxrank.data.spec.entries import CategoricalSpec, RaggedSpec
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
_WITH_FRACTION = r"^-?[0-9]+\.0+$"
# Texts that separate ids, and the pattern of ids that contain one. Names have spaces and slashes.
_SEPARATORS = {s: re.escape(s) for s in ("|", ",", ";", "\t", "\x01", "\x02", "\x1d")}
_SEPARATORS |= {s: rf"^[0-9]+({s}[0-9]+)+$" for s in (" ", "/")}
_MAX_SHOWN_VALUES = 3
_OWN_VALUES = {"-", "?", "missing", "undefined", "unknown"}  # also used as ordinary values


def notes(features: FeatureSpec, data: Source, split: str) -> list[str]:
    """Returns a line for each feature whose values do not look like ids."""
    chunk = _first_chunk(data, split)
    if chunk is None:
        return []
    entries: list[CategoricalSpec | RaggedSpec] = [*features.categorical, *features.ragged]
    return [line for entry in entries for line in _entry_values(entry, chunk)]


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
    spaced = pc.match_substring_regex(values, r"^\s|\s$")
    share = _share(spaced)
    if share > 0:
        example = values.filter(spaced)[0].as_py()
        yield (
            f"feature {entry.name}: {share:.1%} of the first {len(values):,} values begin or end"
            f" with a space, such as {example!r}, which makes them different values. If the space"
            " belongs to the separator, include it in `separator`"
        )
    yield from _describe_floats(entry.name, values)
    if entry.encoding == "hash":  # without a vocabulary, which has all values
        line = forms_line(f"feature {entry.name}", pc.unique(values))
        yield from [line] * bool(line)
    lower = pc.utf8_lower(pc.utf8_trim_whitespace(values))
    words = pc.is_in(lower, value_set=pa.array(sorted(MISSING_WORDS - _OWN_VALUES)))
    share = _share(words)
    if share > 0:
        texts = pc.unique(values.filter(words)).to_pylist()[:_MAX_SHOWN_VALUES]
        way = "list them in padding"
        if not isinstance(entry, RaggedSpec):
            way = "list them in source.null_values (csv), or write null"
        yield (
            f"feature {entry.name}: {share:.1%} of the first {len(values):,} values are"
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
    if not isinstance(entry, RaggedSpec):
        return
    for separator, pattern in _SEPARATORS.items():
        contains = pc.match_substring_regex(values, pattern)
        is_read = separator == entry.weight_separator
        is_read |= separator == entry.separator and not is_list_type
        if is_read or _share(contains) <= 0.5:
            continue
        example = values.filter(contains)[0].as_py()
        way = f"set separator={separator!r}"
        if is_list_type:
            way = "write each id as a part of the list, or the column as text"
        yield (
            f"feature {entry.name}: most of the first {len(values):,} ids contain {separator!r},"
            f" such as {example!r}. If it separates ids, {way}"
        )
        return


def _describe_floats(name: str, values: pa.Array) -> Iterator[str]:
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
                f"feature {name}: {share:.1%} of the first {len(values):,} values are"
                f" {meaning.format(example)}"
            )


def _share(mask: pa.Array) -> float:
    return float(pc.mean(mask.cast(pa.int8())).as_py() or 0)
