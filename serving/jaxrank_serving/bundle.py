"""Opens a bundle and checks it.

    BUNDLE/manifest.json        format, and bytes and checksum of every other file; written last
    BUNDLE/signature.json       see `signature`
    BUNDLE/model.onnx           the dense part
    BUNDLE/model.stablehlo      the same for XLA
    BUNDLE/tables/<stack>.bin   rows in logical order, little-endian
    BUNDLE/vocabularies.bin     see `index`
    BUNDLE/model_card.md

docs/decisions/0012-the-bundle.md of jaxrank has the reasons.
"""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from jaxrank_serving.errors import BundleError
from jaxrank_serving.signature import Signature, parse, upgraded

MANIFEST = "manifest.json"
FORMAT, VERSION = "jaxrank bundle", 3
OLDEST = 1  # format version that is still read
_WITHOUT_CORRECTIONS = 2
_PIECE = 1 << 22  # bytes read at once for a checksum
_CHECKSUM = "checksum"


class Bundle(NamedTuple):
    """An open bundle.

    version: checksum of the manifest, which identifies the content.
    files: {relative path: (bytes, checksum)}.
    """

    path: Path
    version: str
    files: dict[str, tuple[int, str]]
    signature: Signature

    def file(self, name: str) -> Path:
        """Returns the path of a file of the manifest.

        Raises:
            BundleError: the manifest does not have it.
        """
        return _file(self.path, name, self.files)

    def verify(self) -> None:
        """Reads all files and compares their checksums with those of the manifest.

        Raises:
            BundleError: a file has changed.
        """
        _verify(self.path, self.files)


class Delta(NamedTuple):
    """An open delta, see `delta.parts`.

    base: version of the bundle that it changes.
    files: {relative path: (bytes, checksum)}.
    """

    path: Path
    base: str
    files: dict[str, tuple[int, str]]

    def file(self, name: str) -> Path:
        """Returns the path of a file of the manifest, as `Bundle.file` does."""
        return _file(self.path, name, self.files)

    def verify(self) -> None:
        """Compares the checksums of all files, as `Bundle.verify` does."""
        _verify(self.path, self.files)


def _file(path: Path, name: str, files: dict[str, tuple[int, str]]) -> Path:
    if name not in files:
        raise BundleError(f"{path}: must have the file {name!r}: found none of that name.")
    return path / name


def _verify(path: Path, files: dict[str, tuple[int, str]]) -> None:
    for name, (_, must) in files.items():
        actual = checksum(path / name)
        if actual != must:
            raise BundleError(
                f"{path / name}: is corrupt: its checksum must be {must}: found {actual}."
                " Export the model again."
            )


def seal(tree: dict[str, Any]) -> str:
    """Returns the checksum of a manifest without its own checksum."""
    content = {key: value for key, value in tree.items() if key != _CHECKSUM}
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())


def format_version(signature: Signature) -> int:
    """Returns the oldest format whose programs read all parts of a signature."""
    return VERSION if signature.calibration else _WITHOUT_CORRECTIONS


def checksum(path: Path) -> str:
    """Returns the xxh3_128 of a file."""
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def open_bundle(path: str | Path) -> Bundle:
    """Opens a bundle. Checks the manifest, the sizes of all files, and the signature.

    Raises:
        BundleError: the bundle is absent, damaged, incomplete or of another format.
    """
    path = Path(path)
    tree = _manifest(path)
    if tree.get("base") is not None:
        raise BundleError(
            f"{path}: must be a whole bundle: found a delta of {tree['base']!r}. Apply it to that"
            " one with jaxrank_serving.apply_delta."
        )
    files = _files(path, tree)
    name = "signature.json"
    content = upgraded(_read(path, name, files), tree["format_version"])
    bundle = Bundle(path, tree[_CHECKSUM], files, parse(content))
    _check_names(bundle)
    return bundle


def open_delta(path: str | Path) -> Delta:
    """Opens a delta. Checks the manifest and the sizes of all files.

    Raises:
        BundleError: the delta is absent, damaged, incomplete or of another format.
    """
    path = Path(path)
    tree = _manifest(path)
    if not isinstance(tree.get("base"), str):
        raise BundleError(f"{path}: must be a delta: found a whole bundle.")
    return Delta(path, tree["base"], _files(path, tree))


def _manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    try:
        tree = json.loads(file.read_bytes())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise BundleError(
            f"{path}: must be a bundle: found no {MANIFEST}. Run `jaxrank export`."
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise BundleError(f"{file}: must be readable as JSON: {error}.") from error
    if not isinstance(tree, dict) or tree.get("format") != FORMAT:
        actual = tree.get("format") if isinstance(tree, dict) else tree
        raise BundleError(f"{file}: must be of the format {FORMAT!r}: found {actual!r:.80}.")
    check_version(file, tree)
    must = seal(tree)
    if tree.get(_CHECKSUM) != must:
        raise BundleError(
            f"{file}: is corrupt: its checksum must be {must}: found {tree.get(_CHECKSUM)!r}."
        )
    return tree


def check_entries(file: Path, tree: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the files of a manifest {relative path: entry with bytes and checksum}.

    Args:
        file: the manifest, for messages.

    Raises:
        BundleError: an entry is incomplete, or a path may be outside of the bundle.
    """
    entries = tree.get("files")
    if not isinstance(entries, dict):
        raise BundleError(f"{file}: files must be an object: found {entries!r:.80}.")
    for name, entry in entries.items():
        if not isinstance(entry, dict) or not {"bytes", _CHECKSUM} <= entry.keys():
            raise BundleError(
                f"{file}: {name} must have bytes and a checksum: found {entry!r:.80}."
            )
        if not all(re.fullmatch(r"[\w-][\w.-]*", part) for part in name.split("/")):
            raise BundleError(f"{file}: a file must be within the bundle: found {name!r}.")
    return entries


def check_version(file: Path, tree: dict[str, Any]) -> None:
    """Checks that this program reads the format version of a manifest.

    Raises:
        BundleError: it is another version.
    """
    version = tree.get("format_version")
    if type(version) is not int or not OLDEST <= version <= VERSION:
        is_newer = type(version) is int and version > VERSION
        hint = "Install a newer jaxrank-serving" if is_newer else "Export the model again"
        raise BundleError(
            f"{file}: must have a format_version of {OLDEST} to {VERSION}, which this program"
            f" reads: found {version!r}. {hint}."
        )


def _files(path: Path, tree: dict[str, Any]) -> dict[str, tuple[int, str]]:
    """Checks the names and sizes of the files of a manifest."""
    files = {}
    for name, entry in check_entries(path / MANIFEST, tree).items():
        try:
            size = (path / name).stat().st_size
        except OSError as error:
            raise BundleError(
                f"{path / name}: must exist: found {error}. Copy the whole bundle."
            ) from error
        if size != entry["bytes"]:
            raise BundleError(
                f"{path / name}: must have {entry['bytes']:,} bytes: found {size:,}. The copy is"
                " incomplete, or the file has changed."
            )
        files[name] = (size, entry[_CHECKSUM])
    return files


def _read(path: Path, name: str, files: dict[str, tuple[int, str]]) -> Any:
    if name not in files:
        raise BundleError(f"{path}: must have the file {name!r}: found none of that name.")
    content = (path / name).read_bytes()
    if xxhash.xxh3_128_hexdigest(content) != files[name][1]:
        raise BundleError(
            f"{path / name}: is corrupt: its checksum must be"
            f" {files[name][1]}: found another. Export the model again."
        )
    return json.loads(content)


def _check_names(bundle: Bundle) -> None:
    """Checks that the parts of a signature refer to parts that exist."""
    signature = bundle.signature
    stacks = {stack.name for stack in signature.stacks}
    tables = {table.name for table in signature.tables}
    columns = {column.name for column in signature.columns}
    wrong: list[str] = []
    for derived in signature.derived:
        wrong += [name for name in derived.columns if name not in columns]
        columns.add(derived.name)
    entries: list[Any] = [*signature.categorical, *signature.ragged]
    features = {f.name for f in entries}
    wrong += [t.name for t in signature.tables if t.stack not in stacks]
    wrong += [f.name for f in entries if f.table not in tables]
    wrong += [f.column for f in signature.dense if f.column not in columns]
    ages = {sequence.age for sequence in signature.sequences}
    wrong += [name for name in features - ages if name not in columns]
    for sequence in signature.sequences:
        times = {sequence.time, sequence.example_time} - {""}
        wrong += [name for name in sequence.features if name not in features]
        wrong += [name for name in times if name not in columns]
    wrong += [f.weights for f in signature.ragged if f.weights and f.weights not in columns]
    for stack in signature.stacks:
        read = (*(name for name, _ in stack.ids), *stack.lists, *stack.sequences)
        wrong += [name for name in read if name not in features]
        bundle.file(stack.file)
    if wrong:
        raise BundleError(f"{bundle.path}: signature.json must name existing parts: found {wrong}.")
