"""Detects files that are not text by their first bytes, and names a remedy."""

_PARQUET = "Parquet: set source.kind='parquet'"
_ARCHIVE = "unpack it first"
_AGAIN = "decompress it once more"
_OTHER_COMPRESSION = "decompress it first, or compress it by gzip"
# First bytes -> kind of the file.
_MAGIC = {
    b"PK\x03\x04": f"a zip archive: {_ARCHIVE}",
    b"PK\x05\x06": f"a zip archive: {_ARCHIVE}",
    b"7z\xbc\xaf\x27\x1c": f"a 7z archive: {_ARCHIVE}",
    b"Rar!\x1a\x07": f"a rar archive: {_ARCHIVE}",
    b"PAR1": _PARQUET,
    b"ORC": "ORC: write it as Parquet",
    b"Obj\x01": "Avro: write it as Parquet",
    b"ARROW1": "an Arrow or Feather file: write it as Parquet",
    b"\xff\xff\xff\xff": "an Arrow stream: write it as Parquet",
    b"SQLite format 3\0": "an SQLite database: export its table",
    b"\x89HDF": "HDF5: write it as Parquet",
    b"\x80\x02": "a Python pickle: write it as Parquet",
    b"\x80\x03": "a Python pickle: write it as Parquet",
    b"\x80\x04\x95": "a Python pickle: write it as Parquet",
    b"\x80\x05\x95": "a Python pickle: write it as Parquet",
    b"\x93NUMPY": "a NumPy file: write it as Parquet",
    b"\xd0\xcf\x11\xe0": "an Excel file: export it as CSV",
    b"%PDF": "a PDF",
    b"\x1f\x8b": f"gzip: {_AGAIN}",
    b"BZh": f"bzip2: {_AGAIN}",
    b"\xfd7zXZ": f"xz: {_AGAIN}",
    b"\x28\xb5\x2f\xfd": f"zstd: {_AGAIN}",
    b"\x04\x22\x4d\x18": f"lz4: {_AGAIN}",
    b"\xff\x06\0\0sNaPpY": f"snappy: {_OTHER_COMPRESSION}",
    b"\x1f\x9d": f"compress (.Z): {_OTHER_COMPRESSION}",
    b"\x89LZO": f"lzo: {_OTHER_COMPRESSION}",
    b"\x5d\0\0": f"lzma: {_OTHER_COMPRESSION}",
    b"x\x9c": f"zlib (deflate): {_OTHER_COMPRESSION}",
    b"x\xda": f"zlib (deflate): {_OTHER_COMPRESSION}",
    b"PARE": "an encrypted Parquet file: decrypt it first",
    b"\xff\xfe\0\0": "UTF-32: convert it to UTF-8",
    b"\0\0\xfe\xff": "UTF-32: convert it to UTF-8",
    b"\xff\xfe": "UTF-16: convert it to UTF-8, as by iconv -f UTF-16 -t UTF-8",
    b"\xfe\xff": "UTF-16: convert it to UTF-8, as by iconv -f UTF-16 -t UTF-8",
}
# The same of files of text, whose first letters no line of names has.
_TEXT_MAGIC = {
    b"version https://git-lfs.github.com": "a pointer of Git LFS: fetch the file with git lfs pull",
    b"<!doctype": "a page of HTML, as a server sends in place of a file",
    b"<html": "a page of HTML, as a server sends in place of a file",
    b"<?xml": "XML: write it as CSV or Parquet",
    b"<error>": "XML of an error, as a server sends in place of a file",
}
_TAR_AT = 257  # bytes, the position of the magic number of a tar archive
_FIRST_OF_TEXT = 9  # a tab: text contains no smaller bytes
_RECORD_HEAD = 12  # bytes of a TFRecord before its data: a length and a checksum


def not_parquet(start: bytes) -> str:
    """Returns the kind of a file that is no Parquet by its first bytes, "" if it may be Parquet."""
    if start.startswith(b"PAR1"):
        return ""
    if kind := other_kind(start):
        return kind.replace(_AGAIN, "decompress it first")
    return "text: set source.kind='csv'" if _is_text(start) else ""


def not_tfrecord(start: bytes) -> str:
    """Returns the kind of a file that is no TFRecord by its first bytes, "" if it may be one."""
    if kind := other_kind(start):
        return "" if "tfrecord" in kind else kind.replace(_AGAIN, _OTHER_COMPRESSION)
    return "text: set source.kind='csv'" if _is_text(start) else ""


def _is_text(start: bytes) -> bool:
    return bool(start) and min(start) >= _FIRST_OF_TEXT


def other_kind(start: bytes) -> str:
    """Returns the kind of a file that begins with these bytes, or "" if it may be text."""
    sample = start[:256]
    is_binary = any(byte < _FIRST_OF_TEXT for byte in sample)
    for magic, kind in _MAGIC.items():
        # Some column names begin with the same letters.
        if start.startswith(magic) and (is_binary or not magic.isascii()):
            return kind
    if start[_TAR_AT : _TAR_AT + 5] == b"ustar":
        return f"a tar archive: {_ARCHIVE}"
    text = start.lstrip()
    for magic, kind in _TEXT_MAGIC.items():
        if text[: len(magic)].lower() == magic:
            return kind
    line = text.partition(b"\n")[0].rstrip()
    is_record = line.startswith((b'{"', b'[{"')) and line.endswith((b"}", b"]", b"},"))
    if is_record or line in (b"[", b"{"):
        return "JSON: write it as CSV or Parquet"
    zeros = [sample[i::2].count(0) for i in (0, 1)]
    if len(sample) >= 8 and max(zeros) > len(sample) // 4 and not min(zeros):
        return "UTF-16 without a byte order mark: convert it to UTF-8"
    length = int.from_bytes(start[:8], "little")
    if 0 < length < 1 << 24 and start[3:8] == b"\0\0\0\0\0" and len(start) > _RECORD_HEAD:
        return "TFRecord: set source.kind='tfrecord'"
    return ""
