"""Sources of raw records: files of text, Parquet or TFRecord, or generated data.

A source yields chunks of a few thousand records as Arrow columns, so its memory does not grow with
the files.
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
from jaxrank.data.sources.tfrecord.source import TFRecordSource
from jaxrank.data.sources.tfrecord.tf_example import COLUMN_TYPES
from jaxrank.data.synthetic.arguments import Arguments
from jaxrank.errors import InputError
from jaxrank.validate import check_choice, field, parse, require

if TYPE_CHECKING:
    from jaxrank.data.synthetic.source import SyntheticSource

_MAX_NULL_VALUES, _MAX_NULL_LENGTH = 64, 64
_FILES = (
    "files of each split: a path or URL, a glob, a directory, or a list of those; by name of the"
    " split: letters, digits, - and _"
)


@dataclasses.dataclass(frozen=True)
class Files:
    """A source that reads files."""

    kind: str = field(help="format of the files")
    files: Mapping[str, Any] = field({}, help=_FILES)

    def check(self, where: str) -> None:
        _check_splits(self.files, f"{where}.files")
        for split, named in self.files.items():
            files.check_named(named, f"{where}.files.{split}")

    def paths(self) -> dict[str, list[str]]:
        """Returns the files of each split."""
        paths = {}
        for name, at in self.files.items():
            try:
                paths[name] = files.find(at)
            except files.MissingFile as error:
                raise files.MissingFile(f"source.files.{name}: {error}") from error
        return paths


@dataclasses.dataclass(frozen=True)
class Criteo(Files):
    """The format of Criteo's files: tab-separated, without a header."""

    kind: str = field("criteo", choices=("criteo",), help="Criteo's format")

    def make(self, used: Collection[str]) -> "Source":
        return TextSource(self.paths(), "\t", header=False)


@dataclasses.dataclass(frozen=True)
class Csv(Files):
    """Delimited text with a header."""

    kind: str = field("csv", choices=("csv",), help="delimited text with a header")
    delimiter: str = field(
        ",", help="separator of the columns, one ASCII character other than a quote or line ending"
    )
    null_values: tuple[str, ...] = field(
        (),
        help="texts that stand for a missing value, in addition to the empty one: at most"
        f" {_MAX_NULL_VALUES}, each of at most {_MAX_NULL_LENGTH} characters",
    )

    escape: str = field(
        "",
        choices=("", "\\"),
        help="a backslash if it escapes quotes and other letters, as in Spark; empty: quotes"
        " within quotes are doubled",
    )
    columns: tuple[str, ...] = field(
        (),
        help="names of the columns, in order, of files without a header; empty: files have one",
    )

    def check(self, where: str) -> None:
        super().check(where)
        differ = len(set(self.columns)) == len(self.columns) and "" not in self.columns
        require(differ, f"{where}.columns", "names, each once", self.columns)
        delimiter, place = self.delimiter, f"{where}.delimiter"
        condition = bool(re.fullmatch(r"[\x01-\x7f]", delimiter, re.DOTALL))
        require(condition, place, "one ASCII character", delimiter)
        must = "neither a quote nor the end of a line"
        require(delimiter not in '"\r\n', place, must, delimiter)
        self._check_null_values(f"{where}.null_values")

    def make(self, used: Collection[str]) -> "Source":
        return TextSource(
            self.paths(),
            self.delimiter,
            header=True,
            null_values=self.null_values,
            escape=self.escape,
            columns=self.columns,
        )

    def _check_null_values(self, place: str) -> None:
        values = self.null_values
        longest = max(values, key=len, default="")
        # Arrow stores them in a tree of limited size. Beyond it, texts are missed or the process
        # crashes.
        if len(values) > _MAX_NULL_VALUES or len(longest) > _MAX_NULL_LENGTH:
            raise InputError(
                f"{place}: must be at most {_MAX_NULL_VALUES} strings of at most {_MAX_NULL_LENGTH}"
                f" characters: found {len(values)}, the longest of {len(longest)}."
            )
        for value in values:
            condition = not re.search("[\n\ud800-\udfff]", value)
            require(condition, place, "texts in UTF-8, on one line", value)


@dataclasses.dataclass(frozen=True)
class Parquet(Files):
    """Parquet files."""

    kind: str = field("parquet", choices=("parquet",), help="Parquet")

    def make(self, used: Collection[str]) -> ParquetSource:
        return ParquetSource(self.paths(), used)


@dataclasses.dataclass(frozen=True)
class TFRecord(Files):
    """TFRecord files of tf.Example."""

    kind: str = field("tfrecord", choices=("tfrecord",), help="TFRecord files of tf.Example")
    columns: Mapping[str, str] | None = field(
        None,
        choices=COLUMN_TYPES,
        non_empty=True,
        help="the type of each column, by the name of its feature; none: inferred from the first"
        " records of the first file",
    )

    def make(self, used: Collection[str]) -> "Source":
        return TFRecordSource(self.paths(), self.columns)


@dataclasses.dataclass(frozen=True)
class Synthetic(Arguments):
    """Generated data."""

    def check(self, where: str) -> None:
        super().check(where)
        _check_splits(self.rows, f"{where}.rows")

    def make(self, used: Collection[str]) -> "SyntheticSource":
        from jaxrank.data.synthetic.source import SyntheticSource  # imported only when needed

        return SyntheticSource(self)


KINDS: Mapping[str, type] = {
    "criteo": Criteo,
    "csv": Csv,
    "parquet": Parquet,
    "synthetic": Synthetic,
    "tfrecord": TFRecord,
}


class Source(Protocol):
    """Raw records in splits. Their parts can be read in any order, repeatedly and by other
    processes.

    files: paths and URLs of all splits. Empty for generated data.
    types: of columns by name, if they depend on the other files.
    hint: a sentence, with a leading space, for messages about a missing column, or "".
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
        """Returns the names of the columns, which are equal for all splits."""
        ...

    def check_columns(self, used: Collection[str]) -> None:
        """Rejects files in which used columns are missing or have incompatible types.

        Raises:
            InputError: names file and column.
        """
        ...

    def marks(self) -> dict[str, File]:
        """Returns the version of each file, by path, to detect changes. Taken before `parts` is
        called.
        """
        ...

    def parts(self, split: str) -> list[Part]:
        """Returns the parts of a split, in order. They depend only on the files."""
        ...

    def chunks(self, part: Part, rejects: Rejects) -> Iterator[Chunk]:
        """Yields the records of a part in order, in chunks of one or more.

        Malformed records go to `rejects`.

        Raises:
            InputError: as in `Rejects.reject`, or the rest of the file cannot be read.
        """
        ...


def fields(kind: str | None) -> list[str]:
    """Returns the fields of the config's section, or [] for an unknown kind."""
    section: Any = KINDS.get(kind or "")
    return [f.name for f in dataclasses.fields(section)] if section else []


def make_source(source: Mapping[str, Any], used: Collection[str] = ()) -> Source:
    """Returns the source that the config's section describes.

    Args:
        source: the section.
        used: names of columns. Columnar formats read no others. Empty: all.

    Raises:
        InputError: an unknown kind or field, a missing file, or differing headers.
    """
    return _section(source).make(used)


def parquet_source(source: Mapping[str, Any]) -> ParquetSource:
    """Returns `make_source` for a section of the kind "parquet"."""
    return _section(source, "parquet").make(())


def synthetic_source(source: Mapping[str, Any]) -> "SyntheticSource":
    """Returns `make_source` for a section of the kind "synthetic"."""
    return _section(source, "synthetic").make(())


def _section(source: Mapping[str, Any], kind: str = "") -> Any:
    """Returns the section of this kind, or of any kind if it is empty."""
    actual = source.get("kind")
    check_choice("source.kind", actual, KINDS)
    section: Any = parse(KINDS[kind or str(actual)], source, "source")
    if isinstance(section, Files) and not section.files:
        must = "must be a dict of split names and files"
        raise InputError(f"source.files: {must}: found {source.get('files')!r}.")
    return section


def _check_splits(names: Iterable[Any], where: str) -> None:
    for split in names:
        # A split is a directory of the store, next to the directory of the vocabularies.
        if not re.fullmatch(r"[A-Za-z0-9][\w-]*", str(split)) or split == "vocabulary":
            raise InputError(
                f"{where}: the name of a split must consist of letters, digits, - and _, and must"
                f" not be 'vocabulary': found {split!r}."
            )
