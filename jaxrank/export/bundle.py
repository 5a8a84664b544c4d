"""Exports a trained model as a bundle, which `jaxrank_serving` scores without JAX or jaxrank.

Each file is recorded in progress.json when it is complete. An export that was killed or that ran
out of disk space continues after the last complete file.
"""

import dataclasses
import functools
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

import jaxrank
from jaxrank import json_files
from jaxrank.config_files import to_plain
from jaxrank.data.keyed_hash import Pseudonymise, fingerprint, pseudonymise, read_key
from jaxrank.data.lock import empty_directory
from jaxrank.data.spec.features import FeatureSpec
from jaxrank.data.spec.resolve import resolve_stored
from jaxrank.errors import InputError
from jaxrank.export import dense_part as dense_parts
from jaxrank.export import signature as signatures
from jaxrank.export.card import card, results
from jaxrank.export.comparison.check import check
from jaxrank.export.comparison.defaults import check_defaults
from jaxrank.export.comparison.parity import Parity
from jaxrank.export.comparison.raw_rows import raw_rows
from jaxrank.export.comparison.validation import with_validation
from jaxrank.export.delta.write import DeltaSize, open_base, write_delta
from jaxrank.export.progress import Progress
from jaxrank.export.signature import Requests
from jaxrank.export.stack_files import write_stack
from jaxrank.export.statistics import statistics
from jaxrank.export.table_rows import table_rows
from jaxrank.export.vocabulary_index import Written, write_index
from jaxrank.export.write import Source, open_source, written
from jaxrank.report import Report
from jaxrank.step import Weights

if TYPE_CHECKING:
    from jaxrank_serving.bundle import Bundle
    from jaxrank_serving.signature import Signature

PARITY_ROWS = 1000
_WHOLE, _CHANGES = "whole", "changes"  # of a delta while it is written
_INDEX = "vocabularies.bin"
_ONNX, _STABLEHLO = "model.onnx", "model.stablehlo"


class BundleExport(NamedTuple):
    """Summary of an export.

    Fields with the same name as in `write.Export` have the same meaning.

    bytes: of all files.
    onnx: why there is no model in ONNX, or "" if there is one.
    parity: see `parity.Parity`.
    latency_ms: {candidates: {"p50_ms", "p99_ms"}}; {} without a model in ONNX.
    rounding: {task: {metric: change}} of the validation data by rounded tables; {} for float32.
    delta: its size, or None for a whole bundle.
    """

    output: str
    step: int
    tables: int
    rows: int
    bytes: int
    onnx: str
    parity: Parity
    latency_ms: dict[int, dict[str, float]]
    rounding: dict[str, dict[str, float]]
    delta: DeltaSize | None
    seconds: float
    checkpoint: str
    worse_than_constant: list[str]


@dataclasses.dataclass(frozen=True)
class _Content:
    """Content of a bundle, beside the weights of layers.

    spec: resolved.
    signature: without the fields that depend on the files.
    tables: dtype of the stored rows.
    """

    source: Source
    spec: FeatureSpec
    signature: dict[str, Any]
    tables: str


def export_bundle(
    workdir: str,
    *,
    output: str,
    checkpoint: str = "newest",
    data: str = "",
    tables: str = "float32",
    requests: Requests = Requests(),  # noqa: B008  a NamedTuple of constants
    hash_key_file: str = "",
    since: str = "",
    report: Report = print,
) -> BundleExport:
    """Writes the weights that predict in one checkpoint of a run as a bundle.

    The directory appears under its name only when it is complete and predicts like the trained
    program. Tables and vocabularies may be larger than memory.

    Args:
        workdir, output, checkpoint, data: see `write.export`.
        tables: dtype of the stored rows; one of `validate.TABLE_DTYPES`.
        requests: columns that candidates share, and defaults; see `Requests`.
        hash_key_file: key of a store with keyed hashes.
        since: a bundle. If set, a delta of it is written in place of the whole bundle.

    Raises:
        InputError: as `write.export`; or the run's raw data cannot be read, a package is missing,
            or a default is invalid.
        RunError: as `write.export`; or predictions differ from the trained program.
    """
    check_packages("--format=bundle")
    started = time.perf_counter()
    base = open_base(since, tables) if since else None
    source = open_source(workdir, checkpoint, data)
    run = source.run
    spec = bundle_features(source)
    key, hashed = _key(hash_key_file, source)
    raw = raw_rows(run, source.store, spec, PARITY_ROWS, hashed)
    described = signatures.signature(source.layout, source.store, spec, raw.batch.schema, requests)
    described["statistics"] = statistics(source, spec)
    if requests.defaults:
        check_defaults(described | signatures.stacks(source.layout, spec, {}, tables), raw, key)
    content = _Content(source, spec, described, tables)
    interrupted: list[bool] = []
    with (
        written(output, keep=lambda: bool(interrupted)) as partial,
        source.checkpoints.deletion_as_input_error(source.step),
    ):
        try:
            folder = _folder(partial, is_delta=base is not None)
            progress = Progress(folder, _fingerprint(source, tables))
            weights = dense_parts.layers(source.stored, run.weights_shape())
            tree, no_onnx = _write_files(content, weights, folder, progress, report)
            bundle = _open(folder, tree, progress)
            checked = check(bundle, source, weights, raw, key, tables, report)
            tree["statistics"] = with_validation(tree["statistics"], checked.validation)
            progress.renew("signature.json", lambda path: json_files.write(path, tree))
            page = card(tree, results(checked, tables, source.worse_than_constant)).encode()
            progress.renew("model_card.md", lambda path: path.write_bytes(page))
            size = _write_manifest(folder, bundle.signature, progress)
            delta = None
            if base is not None:
                delta = _write_delta(base, folder, partial)
                report(f"{delta.rows:,} of {delta.total_rows:,} rows have changed")
            else:
                progress.remove()
        except (OSError, KeyboardInterrupt):
            interrupted.append(True)  # the same command continues
            raise
    return BundleExport(
        output=output,
        step=source.step,
        tables=len(run.schema.tables),
        rows=sum(table.rows for table in run.schema.tables),
        bytes=size if delta is None else delta.bytes,
        onnx=no_onnx,
        parity=checked.parity,
        latency_ms=checked.latency_ms,
        rounding=checked.validation.rounding,
        delta=delta,
        seconds=time.perf_counter() - started,
        checkpoint=source.path,
        worse_than_constant=source.worse_than_constant,
    )


def _folder(partial: Path, is_delta: bool) -> Path:
    """Returns the directory of the whole bundle, which a delta is made of."""
    if not is_delta:
        return partial
    folder = partial / _WHOLE
    for inside in partial.iterdir():  # of an interrupted export
        if inside != folder and inside.is_dir():
            shutil.rmtree(inside)
        elif inside != folder:
            inside.unlink()
    folder.mkdir(exist_ok=True)
    return folder


def _write_delta(base: "Bundle", whole: Path, folder: Path) -> DeltaSize:
    """Writes a delta beside the whole bundle, which is removed."""
    from jaxrank_serving.bundle import open_bundle

    changes = folder / _CHANGES
    changes.mkdir()
    size = write_delta(base, open_bundle(whole), changes)
    shutil.rmtree(whole)
    for path in changes.iterdir():
        path.rename(folder / path.name)
    changes.rmdir()
    return size


def check_packages(flag: str) -> None:
    """Raises InputError if a package is missing that bundles need.

    Args:
        flag: that needs it.
    """
    try:
        import jaxrank_serving  # noqa: F401

        from jaxrank.export.onnx import convert  # noqa: F401, which needs onnx
    except ImportError as error:
        raise InputError(
            f"{flag}: needs the package {error.name}: found none. Install it in a"
            " clone of jaxrank with pip install ./serving -e '.[serve]', or export with"
            " --format=files."
        ) from error


def bundle_features(source: Source) -> FeatureSpec:
    """Returns the resolved features of a run, which a bundle can encode."""
    return resolve_stored(source.run.builder.features, source.run.schema, source.store.schema)


def _key(path: str, source: Source) -> tuple[bytes | None, Pseudonymise | None]:
    """Returns the key of a store with keyed hashes, and its function."""
    expected = source.store.spec.hash_key
    if not expected:
        return None, None
    if not path:
        raise InputError(
            "--hash-key-file: must name the key of the run's data, whose vocabularies hold keyed"
            " hashes: found none."
        )
    key = read_key(path)
    if fingerprint(key) != expected:
        raise InputError(
            f"--hash-key-file: {path}: must be the key of the run's data: found another."
        )
    return key, pseudonymise(key)


def _fingerprint(source: Source, tables: str) -> str:
    """Returns a hash of what the files of a bundle depend on."""
    parts = [jaxrank.__version__, source.path, source.step, tables, to_plain(source.run.config)]
    parts += [source.run.schema, source.stored.checksums, source.calibration]
    return xxhash.xxh3_64_hexdigest(json_files.to_text(parts, sort_keys=True).encode())


def _write_files(
    content: _Content, weights: Weights, folder: Path, progress: Progress, report: Report
) -> tuple[dict[str, Any], str]:
    """Writes all files but the manifest and the card.

    Returns:
        The signature as JSON, and why there is no ONNX model, or "".
    """
    source = content.source
    run, layout = source.run, source.layout
    parents = run.builder.parents
    scratch = folder / "scratch"
    scratch.mkdir(exist_ok=True)
    _write_tables(content, folder, scratch, progress, report)
    vocabularies = [
        (table.name, run.values(table, source.store))
        for table in run.schema.tables
        if table.encoding == "vocabulary"
    ]
    index = Written(**progress.write(_INDEX, lambda path: write_index(vocabularies, path, scratch)))
    scratch.rmdir()
    part = dense_parts.dense_part(run.builder.model(), layout, weights, parents, source.calibration)
    program = functools.partial(dense_parts.to_stablehlo, part)
    progress.write(_STABLEHLO, lambda path: path.write_bytes(program()))
    no_onnx = progress.write(_ONNX, functools.partial(_write_onnx, part))
    if no_onnx:
        report(f"No model in ONNX: {no_onnx}")
    by = source.calibration.by if source.calibration else None
    stacks = signatures.stacks(layout, content.spec, index.seeds, content.tables)
    tree = content.signature | stacks
    tree |= {
        "outputs": dense_parts.output_names(run.schema, parents, run.builder.ranked),
        "index": {"file": _INDEX, **{f: getattr(index, f) for f in ("values", "bits", "steps")}},
        "model": {
            "onnx": "" if no_onnx else _ONNX,
            "stablehlo": _STABLEHLO,
            "inputs": [array.name for array in part.inputs],
        },
        "calibration": by.to_state() if by else None,
        "origin": {
            "jaxrank_version": jaxrank.__version__,
            "checkpoint": source.path,
            "step": source.step,
            "model": run.builder.model_name,
            "calibration": source.calibration.origin if source.calibration else None,
        },
    }
    progress.renew("signature.json", lambda path: json_files.write(path, tree))
    return tree, no_onnx


def _write_tables(
    content: _Content, folder: Path, scratch: Path, progress: Progress, report: Report
) -> None:
    """Writes the rows of each stack.

    Args:
        scratch: a directory for temporary files, which is empty afterwards.
    """
    source, tables = content.source, content.tables
    (folder / "tables").mkdir(exist_ok=True)
    for stack in source.layout.stacks:
        empty_directory(scratch)
        report(f"Writing {stack.rows:,} rows of dimension {stack.dim} as {tables}")
        names = f"tables/{stack.name}.bin", f"tables/{stack.name}.scales.bin"

        def make(path: Path, stack: Any = stack, scales: Path = folder / names[1]) -> None:
            rows = table_rows(source.stored, source.layout, stack, scratch)
            write_stack(rows, stack.dim, tables, path, scales)

        progress.write(names[0], make, names[1])
    empty_directory(scratch)


def _write_onnx(part: dense_parts.DensePart, path: Path) -> str:
    """Writes the model in ONNX. Returns why it has no such form, or ""."""
    from jaxrank.export.onnx.convert import UnsupportedError, to_onnx
    from jaxrank.export.onnx.graph import Tensor

    inputs = [Tensor(*array) for array in part.inputs]
    try:
        model = to_onnx(part.function, inputs, ["predictions", "logits"])
    except UnsupportedError as error:
        path.write_bytes(b"")
        return str(error)
    path.write_bytes(model.SerializeToString())
    return ""


def _write_manifest(folder: Path, signature: "Signature", progress: Progress) -> int:
    """Writes the manifest and returns the bytes of all files."""
    from jaxrank_serving import bundle

    files = {name: e for name, e in progress.entries().items() if e["bytes"] or name != _ONNX}
    tree = {
        "format": bundle.FORMAT,
        "format_version": bundle.format_version(signature),
        "base": None,  # checksum of the bundle that a delta changes
        "files": files,
    }
    tree["checksum"] = bundle.seal(tree)
    json_files.write(folder / bundle.MANIFEST, tree)
    if not progress.entries()[_ONNX]["bytes"]:
        (folder / _ONNX).unlink(missing_ok=True)
    return sum(entry["bytes"] for entry in files.values())


def _open(folder: Path, tree: dict[str, Any], progress: Progress) -> "Bundle":
    """Opens a bundle that has no manifest yet."""
    from jaxrank_serving.bundle import Bundle
    from jaxrank_serving.signature import parse

    files = {name: (e["bytes"], e["checksum"]) for name, e in progress.entries().items()}
    return Bundle(folder, "", files, parse(json_files.plain(tree)))
