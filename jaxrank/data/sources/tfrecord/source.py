"""Reads TFRecord files of tf.Example as chunks of columns, without TensorFlow.

A record is its length (u64), the length's checksum, its bytes, and their checksum (u32 each, all
little-endian). A checksum is CRC-32C, rotated by 15 bits, plus a constant. Files may be gzip.
"""

import contextlib
import itertools
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import google_crc32c
import numpy as np
import pyarrow as pa

from jaxrank.data import file_kinds, files
from jaxrank.data.chunk import Chunk, Part
from jaxrank.data.files import File
from jaxrank.data.rejects import Rejects
from jaxrank.data.sources import table_formats
from jaxrank.data.sources.text import empty_file
from jaxrank.data.sources.tfrecord import tf_example
from jaxrank.data.sources.tfrecord.example_columns import Bad, decode_columns
from jaxrank.data.sources.tfrecord.tf_example import ColumnType
from jaxrank.errors import InputError

_RECORDS_PER_CHUNK = 8192
_BYTES_PER_CHUNK = 16 << 20
_BYTES_AT_ONCE = 1 << 22
_MAX_RECORD_BYTES = 1 << 30  # maximum bytes of a record
_INFERRED_FROM = 1000  # number of records
_SAMPLE_BYTES = 512  # by which another kind of file is detected
_MAX_EMPTY_FILE_BYTES = 64  # maximum bytes of a compressed empty file
_GZIP_MAGIC = b"\x1f\x8b"
_HEAD = struct.Struct("<QI")
_CRC = struct.Struct("<I")


class Record(NamedTuple):
    """The number of a record in the file, from 1, its bytes, and True if the checksum is valid."""

    row: int
    data: bytes
    intact: bool


class TFRecordSource:
    """TFRecord files of tf.Example.

    Args:
        columns: the type of each column, of `tf_example.COLUMN_TYPES`, by name of its feature.
            Empty: inferred by `tf_example.infer` from the first records of the first file.

    Raises:
        InputError: there are no records to infer them from.
    """

    def __init__(
        self, paths_of: Mapping[str, Sequence[str]], columns: Mapping[str, str] | None = None
    ):
        table_formats.check_plain([path for paths in paths_of.values() for path in paths])
        self._paths_of = {split: _not_empty(paths) for split, paths in paths_of.items()}
        self._is_declared = columns is not None
        if columns is None:
            path = self.files[0]
            first = itertools.islice(read_records(path), _INFERRED_FROM)
            self._types = tf_example.infer((r.data for r in first if r.intact), path)
        else:
            self._types = {name: ColumnType.parse(text) for name, text in columns.items()}

    @property
    def splits(self) -> list[str]:
        return list(self._paths_of)

    @property
    def files(self) -> list[str]:
        return [path for paths in self._paths_of.values() for path in paths]

    @property
    def types(self) -> dict[str, str]:
        return {name: str(kind) for name, kind in self._types.items()}

    @property
    def hint(self) -> str:
        if self._is_declared:
            return ""
        return (
            f" The columns are the features in the first {_INFERRED_FROM:,} records of"
            f" {self.files[0]}: set source.columns to name others with their types."
        )

    def columns(self, split: str) -> list[str]:
        return list(self._types)

    def check_columns(self, used: Collection[str]) -> None:
        del used  # all files are read with the same columns

    def marks(self) -> dict[str, File]:
        return {path: files.describe(path) for path in self.files}

    def parts(self, split: str) -> list[Part]:
        return [Part(split, path, 0, 1) for path in self._paths_of[split]]

    def chunks(self, part: Part, rejects: Rejects) -> Iterator[Chunk]:
        records: list[Record] = []
        size = 0
        for record in read_records(part.file):
            records.append(record)
            size += len(record.data)
            if len(records) == _RECORDS_PER_CHUNK or size >= _BYTES_PER_CHUNK:
                yield from self._chunk(part.file, records, rejects)
                records, size = [], 0
        if records:
            yield from self._chunk(part.file, records, rejects)

    def _chunk(self, path: str, records: Sequence[Record], rejects: Rejects) -> Iterator[Chunk]:
        batch, invalid = decode_columns([r.data if r.intact else b"" for r in records], self._types)
        must = "have the CRC-32C that stands behind it"
        invalid += [
            Bad(i, "", must, "another, so the record is damaged")
            for i, record in enumerate(records)
            if not record.intact
        ]
        first_of = {bad.place: bad for bad in reversed(invalid)}
        for place, bad in sorted(first_of.items()):
            record = records[place]
            rejects.reject(
                file=path,
                row=record.row,
                column=bad.column,
                must=bad.must,
                actual=bad.actual,
                hint=bad.hint,
                record=tf_example.shown(record.data) if record.intact else record.data.hex(),
            )
        rows = np.fromiter((r.row for r in records), np.int64, len(records))
        chunk = Chunk(batch, path, rows)
        if first_of:
            chunk = chunk.drop_records(np.fromiter(first_of, np.int64, len(first_of)))
        if chunk.batch.num_rows:
            yield chunk


def _not_empty(paths: Sequence[str]) -> list[str]:
    """Returns the files with content after decompression, or all files if there are none.

    A writer of parts may leave some of them empty.
    """
    return [path for path in paths if not _is_empty(path)] or list(paths)


def _is_empty(path: str) -> bool:
    if not 0 <= files.describe(path).size <= _MAX_EMPTY_FILE_BYTES:
        return False
    try:
        with contextlib.closing(_open(path)) as stream:
            return not stream.take(1)
    except (OSError, EOFError, pa.ArrowException):
        return False  # reported when the records are read


def read_records(path: str) -> Iterator[Record]:
    """Yields the records of a file in order.

    Raises:
        InputError: the file cannot be read, has no records, or ends within one. Or the checksum of
            a length is invalid, so later records cannot be located.
    """
    row = 0
    try:
        with contextlib.closing(_open(path)) as stream:
            while head := stream.take(_HEAD.size):
                row += 1
                if row == 1:
                    _check_kind(path, head + stream.peek(_SAMPLE_BYTES))
                length = _length(path, row, head)
                data = stream.take(length)
                tail = stream.take(_CRC.size)
                if len(tail) < _CRC.size:
                    raise _cut(path, row)
                yield Record(row, data, _masked_crc(data) == _CRC.unpack(tail)[0])
    except (OSError, EOFError, pa.ArrowException) as error:
        raise InputError(f"{path}: must be readable to its end: found {error}.") from error
    if row == 0:
        raise empty_file(path)


def _masked_crc(data: bytes) -> int:
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _check_kind(path: str, start: bytes) -> None:
    """Rejects another kind of file, whose first bytes are no length with its checksum."""
    if len(start) >= _HEAD.size:
        length, crc = _HEAD.unpack(start[: _HEAD.size])
        if _masked_crc(start[:8]) == crc:
            return
    if kind := file_kinds.not_tfrecord(start):
        raise InputError(f"{path}: must be TFRecord, plain or compressed by gzip: found {kind}.")


def _length(path: str, row: int, head: bytes) -> int:
    if len(head) < _HEAD.size:
        raise _cut(path, row)
    length, crc = _HEAD.unpack(head)
    if _masked_crc(head[:8]) != crc:
        raise InputError(
            f"{path}, row {row}: must begin with its length and the CRC-32C of it, as records of"
            " TFRecord files do: found another CRC-32C, so later records cannot be located."
        )
    if length > _MAX_RECORD_BYTES:
        raise InputError(
            f"{path}, row {row}: must have at most {_MAX_RECORD_BYTES:,} bytes: found {length:,}."
        )
    return length


def _cut(path: str, row: int) -> InputError:
    return InputError(f"{path}, row {row}: must be complete: found the end of the file within it.")


class _Stream:
    """Bytes of a file, read ahead."""

    def __init__(self, file: pa.NativeFile, ahead: bytes = b""):
        self._file, self._ahead, self._at = file, ahead, 0

    def close(self) -> None:
        self._file.close()

    def peek(self, count: int) -> bytes:
        """Returns up to `count` of the next bytes, which stay."""
        data = self.take(count)
        self._ahead, self._at = data + self._ahead[self._at :], 0
        return data

    def take(self, count: int) -> bytes:
        """Returns the next `count` bytes. Fewer at the end of the file."""
        stop = self._at + count
        if stop > len(self._ahead):
            pieces = [self._ahead[self._at :]]
            missing = count - len(pieces[0])
            # The length may be corrupt, so memory is allocated only for bytes that exist.
            while missing > 0 and (piece := self._file.read(_BYTES_AT_ONCE)):
                pieces.append(piece)
                missing -= len(piece)
            self._ahead, self._at, stop = b"".join(pieces), 0, count
        data = self._ahead[self._at : stop]
        self._at += len(data)
        return data


def _open(path: str) -> _Stream:
    file = files.open_input(path)
    head = file.read(_HEAD.size)
    whole = len(head) == _HEAD.size and _masked_crc(head[:8]) == _HEAD.unpack(head)[1]
    # A length may begin with the magic number of gzip.
    if whole or not head.startswith(_GZIP_MAGIC):
        return _Stream(file, head)
    file.close()  # reopened instead of seeking: some web servers send only whole files
    return _Stream(pa.CompressedInputStream(files.open_input(path), "gzip"))
