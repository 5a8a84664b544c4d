"""Where raw records come from: files of text, Parquet or TFRecord, or generated data.

A source hands out chunks of a few thousand records as Arrow columns, so its memory does not grow
with the files.
"""

import inspect
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Protocol

from jaxrank.data import files
from jaxrank.data.chunk import Chunk, Part
from jaxrank.data.files import File
from jaxrank.data.rejects import Rejects
from jaxrank.data.sources.parquet import ParquetSource
from jaxrank.data.sources.text import TextSource
from jaxrank.data.sources.tfrecord import TFRecordSource
from jaxrank.errors import InputError
from jaxrank.validate import check_choice, check_keys

_MOST_NULLS, _LONGEST_NULL = 64, 64
_KINDS = ("criteo", "csv", "parquet", "synthetic", "tfrecord")
_OWN_FIELDS = {"csv": ("delimiter", "null_values"), "tfrecord": ("columns",)}


class Source(Protocol):
    """Raw records in splits, in parts that can be read in any order, any number of times, and in
    other processes.

    files: paths and URLs of all splits; empty for generated data.
    types: of columns by name, where records are read by what other files have.
    """

    @property
    def splits(self) -> list[str]: ...

    @property
    def files(self) -> list[str]: ...

    @property
    def types(self) -> dict[str, str]: ...

    def columns(self, split: str) -> list[str]:
        """Names of the columns, which are those of every split."""
        ...

    def check_columns(self, used: Collection[str]) -> None:
        """Rejects files whose columns differ among those that are used, or do not exist.

        Raises:
            InputError: naming file and column.
        """
        ...

    def marks(self) -> dict[str, File]:
        """By path, what tells when a file has changed; taken before `parts` is called."""
        ...

    def parts(self, split: str) -> list[Part]:
        """The parts of a split, in order; they depend on nothing but the files."""
        ...

    def chunks(self, part: Part, rejects: Rejects) -> Iterator[Chunk]:
        """The records of a part in order, each chunk of one or more.

        Records that cannot be read as such go to `rejects`.

        Raises:
            InputError: as of `Rejects.refuse`, or the file cannot be read any further.
        """
        ...


def fields(kind: str | None) -> list[str]:
    """What the config's section may hold beside `kind`; nothing where there is no such kind."""
    if kind not in _KINDS:
        return []
    if kind != "synthetic":
        return ["files", *_OWN_FIELDS.get(kind, ())]
    from jaxrank.data.synthetic import source as synthetic  # only where it is asked for

    return list(inspect.signature(synthetic.SyntheticSource).parameters)


def make_source(source: Mapping[str, Any], used: Collection[str] = ()) -> Source:
    """The source that the config's section describes.

    Args:
        source: the section.
        used: names of columns; a format that has each column by itself reads no others. Empty: all.

    Raises:
        InputError: an unknown kind or field, a file that is missing, or headers that differ.
    """
    kind, rest = _checked(source)
    if kind == "synthetic":
        from jaxrank.data.synthetic import source as synthetic

        try:
            inspect.signature(synthetic.SyntheticSource).bind(**rest)
        except TypeError as error:
            raise InputError(f"source (kind={kind!r}): {error}.") from error
        generated = synthetic.SyntheticSource(**rest)
        _check_splits(generated.splits, "source.rows")
        return generated
    if kind == "parquet":
        return parquet_source(source, used)
    paths = _files_of_splits(rest.get("files"))
    if kind == "tfrecord":
        return TFRecordSource(paths, rest.get("columns"))
    if kind == "criteo":
        return TextSource(paths, "\t", header=False)
    delimiter = rest.get("delimiter", ",")
    if not isinstance(delimiter, str) or not re.fullmatch(r"[\x01-\x7f]", delimiter, re.DOTALL):
        raise InputError(f"source.delimiter: must be one ASCII character: found {delimiter!r}.")
    if delimiter in '"\r\n':
        raise InputError(
            f"source.delimiter: must not be a quote or the end of a line: found {delimiter!r}."
        )
    nulls = _null_values(rest.get("null_values", ()))
    return TextSource(paths, delimiter, header=True, null_values=nulls)


def parquet_source(source: Mapping[str, Any], used: Collection[str] = ()) -> ParquetSource:
    """As `make_source`, where the kind is "parquet"."""
    _, rest = _checked(source)
    return ParquetSource(_files_of_splits(rest.get("files")), used)


def _checked(source: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The kind of a section, and its other fields."""
    rest = dict(source)
    kind = rest.pop("kind", None)
    check_choice("source.kind", kind, _KINDS)
    check_keys(rest, fields(kind), f"source (kind={kind!r})")
    return kind, rest


def _null_values(values: Any) -> list[str]:
    place = "source.null_values"
    if not isinstance(values, list | tuple) or not all(isinstance(v, str) for v in values):
        raise InputError(f"{place}: must be a list of texts: found {values!r}.")
    longest = max(values, key=len, default="")
    # Arrow finds them in a tree that has an end; past it a text is not found, or the process dies.
    if len(values) > _MOST_NULLS or len(longest) > _LONGEST_NULL:
        raise InputError(
            f"{place}: must be at most {_MOST_NULLS} texts of at most {_LONGEST_NULL} letters:"
            f" found {len(values)}, the longest of {len(longest)}."
        )
    for value in values:
        if re.search("[\n\ud800-\udfff]", value):
            raise InputError(f"{place}: must be texts in UTF-8, on one line: found {value!r}.")
    return list(values)


def _files_of_splits(section: Any) -> dict[str, list[str]]:
    if not isinstance(section, Mapping) or not section:
        raise InputError(
            f"source.files: must be a dict of split names and files: found {section!r}."
        )
    _check_splits(section, "source.files")
    return {split: files.find(value, f"source.files.{split}") for split, value in section.items()}


def _check_splits(names: Iterable[Any], where: str) -> None:
    for split in names:
        # A split is a directory of the store, beside the one of the vocabularies.
        if not re.fullmatch(r"[A-Za-z0-9][\w-]*", str(split)) or split == "vocabulary":
            raise InputError(
                f"{where}: the name of a split must be letters, digits, - and _, and not"
                f" 'vocabulary': found {split!r}."
            )
