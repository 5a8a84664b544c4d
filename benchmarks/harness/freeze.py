"""Checks that two checkouts give the same results: for changes that must not change behaviour.

    git worktree add /tmp/before HEAD~1
    python -m benchmarks.harness.freeze --before=/tmp/before
    python -m benchmarks.harness.freeze --before=/tmp/before --rows=20000 --only train evaluate

Every command runs by the command line of each checkout, so the script knows neither's modules.

- train: the main job on 1 and 8 CPU devices and in 2 processes of 4. Compares every line of
  `metrics.jsonl` but throughput, and the bytes of every array of every checkpoint, read by Orbax.
- evaluate, predict, export: the printed JSON, the rows of the Parquet file, the bytes of all files.
- compile: the number of instructions per opcode of the programs for v3-8 and h200-1. One whose
  compiler is not installed is reported and left out.
- open: the second checkout evaluates, predicts and exports a run of the first. It also resumes an
  interrupted run of the first. Compares with the run that was not interrupted.

Prints one line per comparison. Exit status 1 if any differs.
"""

import argparse
import collections
import copy
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

THROUGHPUT = ("examples_per_second", "seconds")  # parts of the names of fields in metrics.jsonl
TOPOLOGIES = ("v3-8", "h200-1")
ROWS = 2_000_000  # of the main job
CASES = ("train", "evaluate", "predict", "export", "compile", "open")
_NO_COMPILER = "compiler must be installed"
_WAIT = 600  # seconds for a run to write its first metrics

# Writes the text of every program that jaxrank compiles ahead of time.
_RECORD = """
import itertools, os, sys, jax
compile, number, folder = jax.stages.Lowered.compile, itertools.count(), sys.argv[1]
def recorded(self, *args, **kwargs):
    program = compile(self, *args, **kwargs)
    with open(os.path.join(folder, f"{next(number)}.hlo"), "w") as file:
        file.write(program.as_text())
    return program
jax.stages.Lowered.compile = recorded
del sys.argv[1]
from jaxrank.cli import main
sys.exit(main())
"""


class FailedCommandError(SystemExit):
    """A command of a checkout failed. Ends the script unless it is caught."""


class Checkout:
    """One of the two checkouts, and the folder of its results."""

    def __init__(self, path: Path, results: Path, rows: int, tolerance: float):
        self.path, self.results, self.rows, self.tolerance = path, results, rows, tolerance
        self.runs = results
        results.mkdir(parents=True, exist_ok=True)

    def reading(self, other: "Checkout") -> "Checkout":
        """Returns this checkout with the runs of another one."""
        reader = copy.copy(self)
        reader.runs = other.runs
        return reader

    def environment(self, devices: int = 1) -> dict[str, str]:
        return os.environ | {
            "PYTHONPATH": str(self.path),
            "PYTHON": sys.executable,
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(devices),
        }

    def start(self, command: Sequence[str], devices: int = 1) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(part) for part in command],
            cwd=self.path,
            env=self.environment(devices),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, command: Sequence[str], devices: int = 1) -> str:
        """Runs a command and returns its standard output.

        Raises:
            FailedCommandError: with the output of the command.
        """
        process = self.start(command, devices)
        out, err = process.communicate()
        if process.returncode:
            text = f"{self.path}: {' '.join(map(str, command))} failed:\n{out}{err}"
            raise FailedCommandError(text)
        return out

    def jaxrank(self, *arguments: Any, devices: int = 1) -> str:
        return self.run([sys.executable, "-m", "jaxrank", *arguments], devices)

    def config(self) -> list[str]:
        """The main job, with its data in the folder of results."""
        valid = max(2000, self.rows // 10)
        return [
            "--config=configs/quickstart.py",
            f"--config.source.rows.train={self.rows}",
            f"--config.source.rows.valid={valid}",
            f"--config.data.store={self.results / 'store'}",
        ]

    def train(self, name: str, devices: int) -> Path:
        workdir = self.runs / name
        if not workdir.exists():
            self.jaxrank(
                "train", *self.config(), f"--workdir={workdir}", "--quiet", devices=devices
            )
        return workdir

    def train_in_processes(self) -> Path:
        workdir = self.results / "processes"
        if not workdir.exists():
            self.train("one", 1)  # prepares the data
            flags = [*self.config(), f"--workdir={workdir}", "--quiet"]
            self.run(["bash", "launch/local.sh", "2", "--devices=4", "--", "train", *flags])
        return workdir


def metrics(workdir: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not _is_throughput(k)} for line in lines]


def arrays(workdir: Path) -> dict[str, str]:
    """Returns {checkpoint/part/path of an array: dtype, shape and SHA-256 of its bytes}."""
    import absl.logging
    import jax
    import orbax.checkpoint as ocp

    absl.logging.set_verbosity(absl.logging.ERROR)
    hashes = {}
    reader = ocp.PyTreeCheckpointer()
    for folder in sorted((workdir / "checkpoints").glob("*/*/")):
        if not (folder / "_METADATA").is_file():
            continue
        shapes = reader.metadata(folder).item_metadata.tree
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), shapes)
        tree = reader.restore(folder, restore_args=as_numpy)
        for path, array in jax.tree_util.tree_leaves_with_path(tree):
            name = f"{folder.parent.name}/{folder.name}/{jax.tree_util.keystr(path)}"
            hashed = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
            hashes[name] = f"{array.dtype}{array.shape} {hashed}"
    return hashes


def describe_run(workdir: Path) -> dict[str, Any]:
    lines, saved = metrics(workdir), arrays(workdir)
    if not lines or not saved:
        raise SystemExit(f"{workdir}: has {len(lines)} lines of metrics, {len(saved)} arrays")
    return {f"line {i}": line for i, line in enumerate(lines)} | saved


def evaluation(checkout: Checkout) -> dict[str, Any]:
    workdir = checkout.train("one", 1)
    printed = checkout.jaxrank("evaluate", f"--workdir={workdir}", "--json")
    values = _flat(json.loads(printed.splitlines()[-1]))
    return {k: v for k, v in values.items() if not (_is_throughput(k) or _is_path(v))}


def _is_throughput(name: str) -> bool:
    return any(word in name for word in THROUGHPUT)


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and os.sep in value


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {k: v for key, sub in value.items() for k, v in _flat(sub, f"{name}.{key}").items()}
    return {name: value}


def predictions(checkout: Checkout) -> dict[str, Any]:
    import pyarrow.parquet as pq

    output = checkout.results / "predictions.parquet"
    workdir = checkout.train("one", 1)
    checkout.jaxrank("predict", f"--workdir={workdir}", f"--output={output}")
    table = pq.read_table(output)
    return {name: table[name].to_numpy() for name in table.column_names}


def exported(checkout: Checkout) -> dict[str, Any]:
    output = checkout.results / f"export_of_{checkout.runs.name}"
    workdir = checkout.train("one", 1)
    if not output.exists():
        # Earlier versions write these files without the flag.
        is_new = "--format" in (checkout.path / "jaxrank" / "flags.py").read_text()
        flags = ["--format=files"] if is_new else []
        checkout.jaxrank("export", f"--workdir={workdir}", f"--output={output}", *flags)
    files = sorted(path for path in output.rglob("*") if path.is_file())
    return {
        str(path.relative_to(output)): hashlib.sha256(
            path.read_bytes().replace(str(checkout.runs).encode(), b"")
        ).hexdigest()
        for path in files
    }


def instructions(checkout: Checkout) -> dict[str, Any]:
    counts: dict[str, Any] = {}
    for topology in TOPOLOGIES:
        folder = checkout.results / topology
        folder.mkdir()
        flags = [*checkout.config(), f"--topology={topology}"]
        try:
            checkout.run([sys.executable, "-c", _RECORD, str(folder), "compile", *flags])
        except FailedCommandError as error:
            if _NO_COMPILER not in str(error):
                raise
            print(f"compile for {topology}: left out, the compiler is not installed", flush=True)
            continue
        for file in sorted(folder.iterdir()):
            opcodes = re.findall(
                r"^\s+(?:ROOT )?%?[\w.-]+ = .+? ([a-z][\w-]*)\(", file.read_text(), re.M
            )
            for opcode, count in collections.Counter(opcodes).items():
                counts[f"{topology} program {file.stem} {opcode}"] = count
    return counts


def resumed(first: Checkout, second: Checkout) -> dict[str, Any]:
    """Returns the results of a run that `first` starts and `second` resumes."""
    workdir = second.results / "resumed"
    flags = ["train", *first.config(), f"--workdir={workdir}", "--quiet"]
    process = first.start([sys.executable, "-m", "jaxrank", *flags])
    started = time.monotonic()
    while process.poll() is None and time.monotonic() - started < _WAIT:
        log = workdir / "metrics.jsonl"
        if log.is_file() and log.stat().st_size:
            process.send_signal(signal.SIGTERM)
            break
        time.sleep(0.05)
    out, err = process.communicate()
    if process.returncode != 128 + signal.SIGTERM:
        raise SystemExit(f"{first.path}: the run was not interrupted in time:\n{out}{err}")
    second.jaxrank(*flags)
    # The first one saved a checkpoint when it stopped, which the uninterrupted run has not.
    newest = max(int(f.name) for f in (workdir / "checkpoints").iterdir() if f.name.isdecimal())
    return {k: v for k, v in describe_run(workdir).items() if k.startswith((f"{newest}/", "line"))}


def whole(first: Checkout) -> dict[str, Any]:
    workdir = first.train("one", 1)
    newest = max(int(f.name) for f in (workdir / "checkpoints").iterdir() if f.name.isdecimal())
    return {k: v for k, v in describe_run(workdir).items() if k.startswith((f"{newest}/", "line"))}


def differences(before: Mapping[str, Any], now: Mapping[str, Any], tolerance: float) -> list[str]:
    def equal(a: Any, b: Any) -> bool:
        if isinstance(a, dict) and isinstance(b, dict):
            return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
        if isinstance(a, list) and isinstance(b, list):
            return len(a) == len(b) and all(map(equal, a, b))
        try:
            a, b = np.asarray(a), np.asarray(b)
            if tolerance and a.dtype.kind == b.dtype.kind == "f":
                return bool(np.allclose(a, b, rtol=0, atol=tolerance, equal_nan=True))
            return bool(np.array_equal(a, b, equal_nan=a.dtype.kind == "f"))
        except (TypeError, ValueError):
            return a == b

    names = [*before, *(name for name in now if name not in before)]
    return [
        f"{name}: before {before.get(name)!r:.80}, now {now.get(name)!r:.80}"
        for name in names
        if name not in before or name not in now or not equal(before[name], now[name])
    ]


def comparisons(
    before: Checkout, now: Checkout, only: Sequence[str]
) -> Iterator[tuple[str, Callable[[], tuple[dict[str, Any], dict[str, Any]]], float]]:
    """Yields the name of a comparison, a function for both results, and the tolerance."""

    def both(program: Callable[[Checkout], dict[str, Any]]) -> Any:
        return lambda: (program(before), program(now))

    if "train" in only:
        yield "train, 1 device", both(lambda c: describe_run(c.train("one", 1))), 0
        yield "train, 8 devices", both(lambda c: describe_run(c.train("eight", 8))), 0
        yield (
            "train, 2 processes of 4 devices",
            both(lambda c: describe_run(c.train_in_processes())),
            0,
        )
    for name, program in (("evaluate", evaluation), ("predict", predictions), ("export", exported)):
        if name in only:
            yield name, both(program), now.tolerance if name != "export" else 0
    if "compile" in only:
        yield "compile", both(instructions), 0
    if "open" in only:
        for name, program in (
            ("evaluate", evaluation),
            ("predict", predictions),
            ("export", exported),
        ):
            yield (
                f"a run of before, {name}",
                lambda program=program: (program(before), program(now.reading(before))),  # type: ignore[misc]
                now.tolerance if program is not exported else 0,
            )
        yield "a run of before, resumed", lambda: (whole(before), resumed(before, now)), 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, required=True, help="another checkout")
    parser.add_argument("--rows", type=int, default=ROWS, help="training rows of the main job")
    parser.add_argument("--only", nargs="+", choices=CASES, default=CASES)
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.0,
        help="of metrics and predictions; 0: equal to the bit",
    )
    args = parser.parse_args()
    root = Path(__file__).resolve().parents[2]
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        before, now = (
            Checkout(path.resolve(), Path(folder) / name, args.rows, args.tolerance)
            for name, path in (("before", args.before), ("now", root))
        )
        for name, results, tolerance in comparisons(before, now, args.only):
            a, b = results()
            lines = differences(a, b, tolerance)
            failed |= bool(lines) or not a
            print(f"{name}: {len(a)} compared, {len(lines)} differ", flush=True)
            print("".join(f"    {line}\n" for line in lines[:10]), end="", flush=True)
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
