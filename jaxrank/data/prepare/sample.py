"""Reports what the first records of the training data seem to mean without a field that says so.

These are notes and not errors, because the values may be intended.
"""

import itertools
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from jaxrank.data import files
from jaxrank.data.chunk import Chunk
from jaxrank.data.encode.cells import id_elements, list_elements
from jaxrank.data.encode.columns import MISSING_WORDS, is_text
from jaxrank.data.rejects import Rejects
from jaxrank.data.sources.registry import Source
from jaxrank.data.spec.entries import CategoricalSpec, RaggedSpec
from jaxrank.data.spec.features import FeatureSpec
from jaxrank.errors import InputError

_WEIGHTED = r"^.+[:=^#;@~]-?[0-9]*\.?[0-9]+([eE]-?[0-9]+)?$"
# As a float column writes ids: with an exponent, which drops digits, or with a fraction of zero.
_ROUNDED = r"^-?[0-9]\.?[0-9]*[eE]\+?[0-9]+$"
_WITH_FRACTION = r"^-?[0-9]+\.0+$"
_SEPARATORS = "|,;"
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
        is_list = isinstance(entry, RaggedSpec)
        cells = list_elements(entry, chunk).ids if is_list else id_elements(entry, chunk)  # type: ignore[arg-type]
    except InputError:
        return
    values = cells.values.drop_null()
    if not is_text(values.type) or not len(values):
        return
    weighted = pc.match_substring_regex(values, _WEIGHTED)
    if isinstance(entry, RaggedSpec) and not entry.is_weighted:
        share = _share(weighted)
        if share > 0.5:
            example = values.filter(weighted)[0].as_py()
            yield (
                f"feature {entry.name}: {share:.0%} of the first {len(values):,} ids end in a"
                f" separator and a number, such as {example!r}. If the number is a weight, set"
                " weight_separator"
            )
    yield from _describe_lists(entry, values)
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
    lower = pc.utf8_lower(pc.utf8_trim_whitespace(values))
    words = pc.is_in(lower, value_set=pa.array(sorted(MISSING_WORDS - _OWN_VALUES)))
    share = _share(words)
    if share > 0:
        texts = pc.unique(values.filter(words)).to_pylist()[:_MAX_SHOWN_VALUES]
        field = "padding" if is_list else "source.null_values (csv), or write null"
        yield (
            f"feature {entry.name}: {share:.1%} of the first {len(values):,} values are"
            f" {', '.join(map(repr, texts))}, which are read as values. If they mean that a value"
            f" is missing, list them in {field}"
        )


def _describe_lists(entry: CategoricalSpec | RaggedSpec, values: pa.Array) -> Iterator[str]:
    if not isinstance(entry, RaggedSpec):
        return
    for separator in _SEPARATORS:
        contains = pc.match_substring(values, separator)
        if separator in (entry.separator, entry.weight_separator) or _share(contains) <= 0.5:
            continue
        example = values.filter(contains)[0].as_py()
        yield (
            f"feature {entry.name}: most of the first {len(values):,} ids contain {separator!r},"
            f" such as {example!r}. If it separates ids, set separator={separator!r}"
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
