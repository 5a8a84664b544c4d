"""Reads lines of a plain or compressed text file in blocks of bounded size, from any byte on."""

import sys
from collections.abc import Iterator

import pyarrow as pa

from jaxrank.data import file_kinds, files
from jaxrank.errors import InputError

MAX_LINE_BYTES = 1 << 27  # maximum bytes of a line
_MAX_READ_BYTES = 1 << 25  # maximum bytes per read
_SAMPLE_BYTES = 1 << 16
# First bytes -> compression of a file, by name. Arrow reads all but xz.
_MAGIC = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bz2",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
    b"\xfd7zXZ": "xz",
}
_SKIPPABLE = b"\x2a\x4d\x18"  # behind a byte, of frames without data, with which pzstd begins
_NAMES = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".zstd": "zstd", ".lz4": "lz4", ".xz": "xz"}


def compression(path: str) -> str:
    """Returns the compression of a file by its first bytes, in Arrow's terms, or "" if it has none.

    Raises:
        InputError: it differs from the file name's, or the file cannot be read.
    """
    with files.open_input(path) as stream:
        start = _read(stream, max(map(len, _MAGIC)), path)
    codec = next((name for magic, name in _MAGIC.items() if start.startswith(magic)), "")
    named = next((name for end, name in _NAMES.items() if path.endswith(end)), codec)
    if start[1:4] == _SKIPPABLE and 0x50 <= start[0] <= 0x5F:
        codec = "lz4" if named == "lz4" else "zstd"
    if start and codec != named:
        raise InputError(
            f"{path}: must be {named}, as its name says: found {start[:2]!r} at its start."
        )
    if codec == "xz":
        readable = ", ".join(name for name in _MAGIC.values() if name != "xz")
        raise InputError(f"{path}: must be plain or one of {readable}: found xz.")
    return codec


def first_line(path: str) -> tuple[bytes, bool]:
    """Returns the file's first line without its ending, and True if anything follows it.

    Raises:
        InputError: the file cannot be read, or is not text.
    """
    text = b""
    with _open(path, compression(path)) as stream:
        while more := _read(stream, _SAMPLE_BYTES, path):
            if not text and (kind := file_kinds.other_kind(more)):
                raise InputError(f"{path}: must be text, plain or compressed: found {kind}.")
            text += more
            line, _, rest = text.partition(b"\n")
            if rest:
                return line, True
            _check_length(len(line), path, 0)
    return text.partition(b"\n")[0], False


def first_lines(path: str) -> list[bytes]:
    """Returns the whole lines in the file's first 64 KiB, or the start of its first line."""
    with _open(path, compression(path)) as stream:
        text = _read(stream, _SAMPLE_BYTES, path)
    if len(text) < _SAMPLE_BYTES:  # the whole file, whose last line may have no ending
        return text.removesuffix(b"\n").split(b"\n")
    return text.split(b"\n")[:-1] or [text]


def blocks(
    path: str, start: int, stop: int, *, rows: int, smallest: int
) -> Iterator[tuple[int, bytes]]:
    """Yields (position in the file, lines) for the lines that begin in the bytes [start, stop), in
    order.

    Each block is one or more whole lines. A missing ending of the file's last line is added. A
    compressed file is read as a whole, and positions count decompressed bytes.

    Args:
        rows: approximate number of lines per block. At least as many as fit in `smallest` bytes.

    Raises:
        InputError: the file cannot be read to its end, or a line is longer than `MAX_LINE_BYTES`.
    """
    compressed = compression(path) if start == 0 else ""
    if compressed:
        stop = sys.maxsize
    position = max(start - 1, 0)
    with _open(path, compressed, position) as stream:
        text = _read(stream, min(smallest, _SAMPLE_BYTES), path)
        # the first line at or after `start` follows the first line ending from `start` - 1
        if start:
            skipped, text = _skip_line(stream, text, path)
            position += skipped
        line_bytes = len(text) // max(text.count(b"\n"), 1)
        size = min(max(rows * line_bytes, smallest), _MAX_READ_BYTES)
        # one buffer for all blocks, because new memory is slow
        buffer, held = bytearray(text), len(text)
        while position < stop:
            buffer.extend(bytes(max(held + size - len(buffer), 0)))
            got = _fill(stream, memoryview(buffer)[held : held + size], path)
            held += got
            if got < size and held and buffer[held - 1 : held] != b"\n":
                buffer[held : held + 1] = b"\n"
                held += 1
            last = buffer.find(b"\n", stop - position - 1, held) + 1
            end = last or buffer.rfind(b"\n", 0, held) + 1
            if end:
                yield position, bytes(memoryview(buffer)[:end])
            if last or got < size:
                return
            buffer[: held - end] = buffer[end:held]
            position, held = position + end, held - end
            _check_length(held, path, position)


def _skip_line(stream: pa.NativeFile, text: bytes, path: str) -> tuple[int, bytes]:
    """Returns the bytes before the next line of `text` and the stream, and the rest read."""
    skipped = 0
    while text and not (end := text.find(b"\n") + 1):
        skipped += len(text)
        text = _read(stream, _SAMPLE_BYTES, path)
    return (skipped + end, text[end:]) if text else (skipped, b"")


def _open(path: str, compressed: str, position: int = 0) -> pa.NativeFile:
    stream = files.open_input(path)
    if position:
        try:
            stream.seek(position)
        except OSError as error:
            raise InputError(f"{path}: must be readable to its end: found {error}.") from error
    return pa.CompressedInputStream(stream, compressed) if compressed else stream


def _read(stream: pa.NativeFile, size: int, path: str) -> bytes:
    """Reads `size` bytes. Fewer only at the end of the file."""
    buffer = bytearray(size)
    return bytes(buffer[: _fill(stream, memoryview(buffer), path)])


def _fill(stream: pa.NativeFile, buffer: memoryview, path: str) -> int:
    """Fills a buffer from the stream, or to the end of the file. Returns the number of bytes."""
    filled = 0
    try:
        while filled < len(buffer) and (count := stream.readinto(buffer[filled:])):
            filled += count
    except (OSError, EOFError, pa.ArrowException) as error:
        raise InputError(f"{path}: must be readable to its end: found {error}.") from error
    return filled


def _check_length(length: int, path: str, position: int) -> None:
    if length > MAX_LINE_BYTES:
        raise InputError(
            f"{path}: a line must have at most {MAX_LINE_BYTES:,} bytes: found more from byte"
            f" {position:,} on."
        )
