"""The lines of a text file, plain or gzip, in blocks of bounded size, from any byte on."""

import sys
from collections.abc import Iterator

import pyarrow as pa

from jaxrank.data import files
from jaxrank.errors import InputError

LONGEST = 1 << 27  # bytes of a line, and of a block but for its last line
_SAMPLE_BYTES = 1 << 16
_GZIP_MAGIC = b"\x1f\x8b"


def is_gzip(path: str) -> bool:
    """Whether the file is gzip, by its first bytes.

    Raises:
        InputError: it is not, but its name says so.
    """
    with files.open_input(path) as stream:
        magic = _read(stream, 2, path)
    if magic and magic != _GZIP_MAGIC and path.endswith(".gz"):
        raise InputError(f"{path}: must be gzip, as its name says: found {magic!r} at its start.")
    return magic == _GZIP_MAGIC


def first_line(path: str) -> tuple[bytes, bool]:
    """The file's first line without its end, and whether anything follows it."""
    text = b""
    with _open(path, is_gzip(path)) as stream:
        while more := _read(stream, _SAMPLE_BYTES, path):
            text += more
            line, _, rest = text.partition(b"\n")
            if rest:
                return line, True
            _check_length(line, path, 0)
    return text.partition(b"\n")[0], False


def blocks(
    path: str, start: int, stop: int, *, rows: int, smallest: int
) -> Iterator[tuple[int, bytes]]:
    """The lines that begin in the bytes [start, stop), in order: (position in the file, lines).

    Each block is one or more whole lines, of which the file's last gets an end if it has none. Of
    gzip, all lines are read, and positions count what is unpacked.

    Args:
        rows: about how many lines a block should have; as many as lie in `smallest` bytes, if
            those are more.

    Raises:
        InputError: the file cannot be read to its end, or a line is longer than `LONGEST`.
    """
    compressed = start == 0 and is_gzip(path)
    if compressed:
        stop = sys.maxsize
    position = max(start - 1, 0)
    with _open(path, compressed, position) as stream:
        text = _read(stream, min(smallest, _SAMPLE_BYTES), path)
        if start:
            # After the first end at or after `start` - 1 begins the first line at or after it.
            while not (end := text.find(b"\n") + 1):
                position += len(text)
                text = _read(stream, _SAMPLE_BYTES, path)
                if not text:
                    return
            position, text = position + end, text[end:]
        line_bytes = len(text) // max(text.count(b"\n"), 1)
        size = min(max(rows * line_bytes, smallest), LONGEST)
        while position < stop:
            more = _read(stream, size, path)
            text += more
            ended = len(more) < size
            if ended and text and not text.endswith(b"\n"):
                text += b"\n"
            last = text.find(b"\n", stop - position - 1) + 1
            end = last or text.rfind(b"\n") + 1
            if end:
                yield position, text[:end]
            if last or ended:
                return
            position, text = position + end, text[end:]
            _check_length(text, path, position)


def _open(path: str, compressed: bool, position: int = 0) -> pa.NativeFile:
    stream = files.open_input(path)
    if position:
        stream.seek(position)
    return pa.CompressedInputStream(stream, "gzip") if compressed else stream


def _read(stream: pa.NativeFile, size: int, path: str) -> bytes:
    """`size` bytes; fewer only at the end of the file."""
    pieces = []
    try:
        while size and (piece := stream.read(size)):
            pieces.append(piece)
            size -= len(piece)
    except Exception as error:  # each remote file system raises its own
        raise InputError(f"{path}: must be readable to its end: found {error}.") from error
    return b"".join(pieces)


def _check_length(line: bytes, path: str, position: int) -> None:
    if len(line) > LONGEST:
        raise InputError(
            f"{path}: a line must have at most {LONGEST:,} bytes: found more from byte"
            f" {position:,} on."
        )
