"""The input pipeline over its settings: the fastest setting, and its speed-up over a naive one."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrank.studies.study import (
    Context,
    Outcome,
    Panel,
    RunResult,
    Runs,
    RunSpec,
    Series,
    Study,
    Table,
)
from jaxrank.validate import COMPRESSIONS, field

_NO_COMPRESSION = "none"  # in options, where an entry must not be empty
_BLOCK = 8192  # examples of a block, as `prepare` writes it
# One thread of the training process, which makes a batch when the step asks for it.
_NAIVE = {"data.num_workers": 0, "data.prefetch_batches": 0}
_BEST = 1.02  # a later value must be faster by this ratio, which is beyond noise
_COLUMNS = ("setting", "value", "input, examples/s", "over naive", "store, bytes per example")


@dataclasses.dataclass(frozen=True)
class Options:
    compressions: tuple[str, ...] = field(
        tuple(name or _NO_COMPRESSION for name in COMPRESSIONS),
        help="values of data.compression",
        choices=tuple(name or _NO_COMPRESSION for name in COMPRESSIONS),
    )
    block_sizes: tuple[int, ...] = field(
        (1024, _BLOCK, 32_768), help="examples per block of a store", unit="examples", at_least=1
    )
    workers: tuple[int, ...] = field(
        (0, 1, 2, 4), help="values of data.num_workers that divide data.shards", at_least=0
    )
    prefetch: tuple[int, ...] = field(
        (0, 4, 16, 64), help="values of data.prefetch_batches", unit="batches", at_least=0
    )
    seconds: float = field(3.0, help="duration of each measurement", unit="seconds", above=0)


def runs(context: Context) -> Runs:
    options = context.options
    own = context.config.data.compression
    stores = [(name, _BLOCK) for name in map(_plain, options.compressions)]
    stores += [(own, size) for size in options.block_sizes if (own, size) not in stores]
    prepared = yield [_store(compression, size) for compression, size in stores]
    of_store = {
        store: result for store, result in zip(stores, prepared, strict=True) if result.is_done
    }
    rows: list[tuple[Any, ...]] = []

    def add(setting: str, values: Sequence[Any], results: Sequence[RunResult]) -> Any:
        """Adds rows to the table and returns the fastest value."""
        rates = [r.examples_per_second if r.is_done else None for r in results]
        rows.extend((setting, v, rate) for v, rate in zip(values, rates, strict=True))
        return _fastest(values, rates)

    naive_store = _overrides_of(of_store.get((own, _BLOCK)))
    measured = yield [_input("naive", _NAIVE | naive_store, options.seconds)]
    naive = measured[0].examples_per_second
    add("naive", ["one thread, no prefetch"], measured)

    # One setting after the other: each keeps the best values of those before it.
    chosen: dict[str, Any] = dict(_NAIVE)
    listed = [store for store in of_store if store[1] == _BLOCK]
    results = yield [_of_store(s, of_store[s], chosen, options.seconds) for s in listed]
    compression = add("compression", [c or _NO_COMPRESSION for c, _ in listed], results)
    compression = own if compression is None else _plain(compression)
    listed = [store for store in of_store if store[0] == own]
    results = yield [_of_store(s, of_store[s], chosen, options.seconds) for s in listed]
    block = add("block size", [size for _, size in listed], results)
    chosen |= _overrides_of(of_store.get((compression, _BLOCK)))

    shards = context.config.data.shards
    counts = [n for n in options.workers if n == 0 or shards % n == 0]
    for setting, path, values in (
        ("workers", "data.num_workers", counts),
        ("prefetch", "data.prefetch_batches", list(options.prefetch)),
    ):
        specs = [
            _input(f"{setting}-{value}", chosen | {path: value}, options.seconds)
            for value in values
        ]
        best = add(setting, values, (yield specs))
        chosen[path] = chosen[path] if best is None else best

    both = yield [
        RunSpec("bench-naive", _NAIVE | naive_store, "bench", {"seconds": options.seconds}),
        RunSpec("bench-best", dict(chosen), "bench", {"seconds": options.seconds}),
    ]
    return _outcome(rows, naive, of_store, both, compression, block, chosen)


def _plain(name: str) -> str:
    return "" if name == _NO_COMPRESSION else name


def _store(compression: str, block_size: int) -> RunSpec:
    name = f"store-{compression or _NO_COMPRESSION}-{block_size}"
    return RunSpec(name, {"data.compression": compression}, "store", {"block_size": block_size})


def _input(name: str, overrides: Mapping[str, Any], seconds: float) -> RunSpec:
    return RunSpec(f"input-{name}", dict(overrides), "input", {"seconds": seconds})


def _overrides_of(prepared: RunResult | None) -> dict[str, Any]:
    """Returns the overrides that read a prepared store. Without one, the run prepares its own."""
    if prepared is None:
        return {}
    return {"data.store": prepared.values["store"]} | dict(prepared.spec.overrides)


def _of_store(
    store: tuple[str, int], prepared: RunResult, chosen: Mapping[str, Any], seconds: float
) -> RunSpec:
    compression, size = store
    name = f"{compression or _NO_COMPRESSION}-{size}"
    return _input(name, {**chosen, **_overrides_of(prepared)}, seconds)


def _fastest(values: Sequence[Any], rates: Sequence[float | None]) -> Any:
    """Returns the first value that no later one clearly beats, None if no run succeeded."""
    best, fastest = None, 0.0
    for value, rate in zip(values, rates, strict=True):
        if rate is not None and rate > _BEST * fastest:
            best, fastest = value, rate
    return best


def _outcome(
    rows: Sequence[tuple[Any, ...]],
    naive: float,
    of_store: Mapping[tuple[str, int], RunResult],
    both: Sequence[RunResult],
    compression: str,
    block: int | None,
    chosen: Mapping[str, Any],
) -> Outcome:
    sizes = {
        str(c or _NO_COMPRESSION): r.values["bytes"]
        for (c, s), r in of_store.items()
        if s == _BLOCK
    } | {str(s): r.values["bytes"] for (_, s), r in of_store.items()}
    table = [
        (setting, value, rate, rate / naive if rate and naive else None, sizes.get(str(value)))
        for setting, value, rate in rows
    ]
    panels = [
        _panel(name, [row for row in rows if row[0] == name])
        for name in ("compression", "block size", "workers", "prefetch")
    ]
    best = {
        "data.compression": compression,
        "data.num_workers": chosen["data.num_workers"],
        "data.prefetch_batches": chosen["data.prefetch_batches"],
    }
    fastest = max((row[2] for row in rows if row[2]), default=0.0)
    sentences = [
        f"The input alone is {fastest / naive:.2f} times as fast as the naive one"
        f" ({fastest:,.0f} against {naive:,.0f} examples/s)."
        if naive
        else "The naive input could not be measured."
    ]
    if all(result.is_done for result in both):
        before, after = (result.examples_per_second for result in both)
        sentences.append(
            f"Training with the best values is {after / before:.2f} times as fast, at"
            f" {after:,.0f} examples/s; {both[1].values['limit']} limits it."
        )
    sentences.append(
        "Rates are of files in the memory of this machine, so a slower disk changes the order of"
        " the compressions."
    )
    if block is not None and block != _BLOCK:
        sentences.append(
            f"Blocks of {block:,} examples were the fastest; `prepare` writes blocks of {_BLOCK:,}"
            " and has no field for it."
        )
    flags = [f"--config.{path}={value}" for path, value in best.items() if value != ""]
    return Outcome(Table(_COLUMNS, table), panels, sentences, flags)


def _panel(name: str, rows: Sequence[tuple[Any, ...]]) -> Panel:
    measured = [row for row in rows if row[2] is not None]
    bars = Series("input alone", [str(row[1]) for row in measured], [row[2] for row in measured])
    return Panel(name, name, "examples/s", [dataclasses.replace(bars, style="bars")])


STUDY = Study(
    "input", "throughput of the input over its settings, and the best setting", Options, runs
)
