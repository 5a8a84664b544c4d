"""Where raw records come from: files of text, Parquet or TFRecord, or generated data.

A source hands out chunks of a few thousand records as Arrow columns, so its memory does not grow
with the files.
"""

import dataclasses
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from jaxrank.data import files
from jaxrank.data.chunk import Chunk, Part
from jaxrank.data.files import File
from jaxrank.data.rejects import Rejects
from jaxrank.data.sources.parquet import ParquetSource
from jaxrank.data.sources.text import TextSource
from jaxrank.data.sources.tf_example import COLUMN_TYPES
from jaxrank.data.sources.tfrecord import TFRecordSource
from jaxrank.data.synthetic.arguments import Arguments
from jaxrank.errors import InputError
from jaxrank.validate import check_choice, field, parse, require

if TYPE_CHECKING:
    from jaxrank.data.synthetic.source import SyntheticSource

_MOST_NULLS, _LONGEST_NULL = 64, 64
_FILES = (
    "files of each split: a path or URL, a glob, a directory, or a list of those; by name of the"
    " split: letters, digits, - and _"
)


@dataclasses.dataclass(frozen=True)
class Files:
    """A source that reads files."""

    kind: str = field(help="of the source")
    files: Mapping[str, Any] = field({}, help=_FILES)

    def check(self, where: str) -> None:
        _check_splits(self.files, f"{where}.files")
        for split, named in self.files.items():
            files.check_named(named, f"{where}.files.{split}")


@dataclasses.dataclass(frozen=True)
class Criteo(Files):
    """The format of Criteo's files: tab-separated, without a header."""

    kind: str = field("criteo", choices=("criteo",), help="Criteo's format")


@dataclasses.dataclass(frozen=True)
class Csv(Files):
    """Delimited text with a header."""

    kind: str = field("csv", choices=("csv",), help="delimited text with a header")
    delimiter: str = field(",", help="one ASCII character, but no quote and no end of a line")
    null_values: tuple[str, ...] = field(
        (),
        help=f"texts that are missing values, beside the empty one: at most {_MOST_NULLS} of at"
        f" most {_LONGEST_NULL} letters",
    )

    escape: str = field(
        "",
        choices=("", "\\"),
        help="a backslash where it stands before letters that count as themselves, such as quotes,"
        " as Spark writes them; empty: quotes within quotes are doubled",
    )
    columns: tuple[str, ...] = field(
        (),
        help="names of the columns, in order, of files without a line of names; empty: they"
        " have it",
    )

    def check(self, where: str) -> None:
        super().check(where)
        differ = len(set(self.columns)) == len(self.columns) and "" not in self.columns
        require(differ, f"{where}.columns", "names, each once", self.columns)
        delimiter, place = self.delimiter, f"{where}.delimiter"
        holds = bool(re.fullmatch(r"[\x01-\x7f]", delimiter, re.DOTALL))
        require(holds, place, "one ASCII character", delimiter)
        must = "neither a quote nor the end of a line"
        require(delimiter not in '"\r\n', place, must, delimiter)
        self._check_null_values(f"{where}.null_values")

    def _check_null_values(self, place: str) -> None:
        values = self.null_values
        longest = max(values, key=len, default="")
        # Arrow finds them in a tree that has an end; past it a text is not found, or the process
        # dies.
        if len(values) > _MOST_NULLS or len(longest) > _LONGEST_NULL:
            raise InputError(
                f"{place} must be at most {_MOST_NULLS} texts of at most {_LONGEST_NULL} letters:"
                f" found {len(values)}, the longest of {len(longest)}."
            )
        for value in values:
            holds = not re.search("[\n\ud800-\udfff]", value)
            require(holds, place, "texts in UTF-8, on one line", value)


@dataclasses.dataclass(frozen=True)
class Parquet(Files):
    """Parquet files."""

    kind: str = field("parquet", choices=("parquet",), help="Parquet")


@dataclasses.dataclass(frozen=True)
class TFRecord(Files):
    """TFRecord files of tf.Example."""

    kind: str = field("tfrecord", choices=("tfrecord",), help="TFRecord files of tf.Example")
    columns: Mapping[str, str] | None = field(
        None,
        choices=COLUMN_TYPES,
        non_empty=True,
        help="the type of each column, by the name of its feature; none: as the first records of"
        " the first file have them",
    )


@dataclasses.dataclass(frozen=True)
class Synthetic(Arguments):
    """Generated data."""

    def check(self, where: str) -> None:
        super().check(where)
        _check_splits(self.rows, f"{where}.rows")


KINDS: Mapping[str, type] = {
    "criteo": Criteo,
    "csv": Csv,
    "parquet": Parquet,
    "synthetic": Synthetic,
    "tfrecord": TFRecord,
}


class Source(Protocol):
    """Raw records in splits, in parts that can be read in any order, any number of times, and in
    other processes.

    files: paths and URLs of all splits; empty for generated data.
    types: of columns by name, where records are read by what other files have.
    hint: a sentence, with a space in front, for those who miss a column; or empty.
    """

    @property
    def splits(self) -> list[str]: ...

    @property
    def files(self) -> list[str]: ...

    @property
    def types(self) -> dict[str, str]: ...

    @property
    def hint(self) -> str: ...

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
            InputError: as of `Rejects.reject`, or the file cannot be read any further.
        """
        ...


def fields(kind: str | None) -> list[str]:
    """The fields of the config's section; nothing where there is no such kind."""
    section: Any = KINDS.get(kind or "")
    return [f.name for f in dataclasses.fields(section)] if section else []


def make_source(source: Mapping[str, Any], used: Collection[str] = ()) -> Source:
    """The source that the config's section describes.

    Args:
        source: the section.
        used: names of columns; a format that has each column by itself reads no others. Empty: all.

    Raises:
        InputError: an unknown kind or field, a file that is missing, or headers that differ.
    """
    section = _section(source)
    if isinstance(section, Synthetic):
        return _generated(section)
    paths = _files(source, section)
    if isinstance(section, Parquet):
        return ParquetSource(paths, used)
    if isinstance(section, TFRecord):
        return TFRecordSource(paths, section.columns)
    if isinstance(section, Criteo):
        return TextSource(paths, "\t", header=False)
    nulls = section.null_values
    return TextSource(
        paths,
        section.delimiter,
        header=True,
        null_values=nulls,
        escape=section.escape,
        columns=section.columns,
    )


def parquet_source(source: Mapping[str, Any]) -> ParquetSource:
    """As `make_source`, where the kind is "parquet"."""
    return ParquetSource(_files(source, _section(source)))


def synthetic_source(source: Mapping[str, Any]) -> "SyntheticSource":
    """As `make_source`, where the kind is "synthetic"."""
    return _generated(_section(source))


def _generated(section: Synthetic) -> "SyntheticSource":
    from jaxrank.data.synthetic.source import SyntheticSource  # only where it is asked for

    return SyntheticSource(section)


def _section(source: Mapping[str, Any]) -> Any:
    kind = source.get("kind")
    check_choice("source.kind", kind, KINDS)
    return parse(KINDS[str(kind)], source, "source")


def _files(source: Mapping[str, Any], section: Any) -> dict[str, list[str]]:
    if not section.files:
        must = "must be a dict of split names and files"
        raise InputError(f"source.files {must}: found {source.get('files')!r}.")
    return {name: files.find(at) for name, at in section.files.items()}


def _check_splits(names: Iterable[Any], where: str) -> None:
    for split in names:
        # A split is a directory of the store, beside the one of the vocabularies.
        if not re.fullmatch(r"[A-Za-z0-9][\w-]*", str(split)) or split == "vocabulary":
            raise InputError(
                f"{where}: the name of a split must be letters, digits, - and _, and not"
                f" 'vocabulary': found {split!r}."
            )
