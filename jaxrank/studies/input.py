"""The input pipeline over its settings: the fastest setting, and its speed-up over a naive one."""

import dataclasses
import statistics
from collections.abc import Generator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrank.errors import InputError
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
_NAIVE_RUN = "naive"
_BEST = 1.02  # ratio by which another value must be faster than that of the config
_COLUMNS = (
    *("setting", "value", "input alone, examples/s", "over naive"),
    *("training, examples/s", "bytes per example"),
)


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
        (0, 4, 16), help="values of data.prefetch_batches", unit="batches", at_least=0
    )
    repeats: int = field(
        3, help="measurements of each value, of which the median counts", at_least=1
    )
    seconds: float = field(2.0, help="duration of each measurement", unit="seconds", above=0)


class _Row(NamedTuple):
    """A value of a setting. Rates in examples/s and sizes are None where they are not known."""

    setting: str
    value: Any
    input_rate: float | None = None
    training_rate: float | None = None
    size: float | None = None


def runs(context: Context) -> Runs:
    options, fields = context.options, context.fields
    initial, prefetched = fields["data.compression"], fields["data.prefetch_batches"]
    stores = [
        (name, _BLOCK) for name in dict.fromkeys([initial, *map(_plain, options.compressions)])
    ]
    stores += [(initial, size) for size in options.block_sizes if size != _BLOCK]
    prepared = yield [_store(*store) for store in stores]
    if not prepared[0].is_done:
        raise InputError(prepared[0].error)
    stored = {s: result for s, result in zip(stores, prepared, strict=True) if result.is_done}
    chosen = _NAIVE | _store_overrides(stored[initial, _BLOCK])
    rows: list[_Row] = []

    # One setting after the other: each keeps the best values of those before it.
    values = {s: chosen | _store_overrides(stored[s]) for s in stored if s[1] == _BLOCK}
    rates = yield from _rates(values, options)
    naive, naive_overrides = rates.get((initial, _BLOCK)), dict(chosen)
    rows.append(_Row("naive", "one thread, no prefetch", naive))
    rows += [_Row("compression", c or _NO_COMPRESSION, r) for (c, _), r in rates.items()]
    compression, _ = _fastest(rates, (initial, _BLOCK))

    values = {s: chosen | _store_overrides(stored[s]) for s in stored if s[0] == initial}
    rates = yield from _rates(values, options)
    rows += [_Row("block size", size, rate) for (_, size), rate in rates.items()]
    _, block = _fastest(rates, (initial, _BLOCK))
    chosen |= _store_overrides(stored[compression, _BLOCK])

    shards = fields["data.shards"]
    counts = [n for n in dict.fromkeys((0, *options.workers)) if n == 0 or shards % n == 0]
    values = {n: chosen | {"data.num_workers": n} for n in counts}
    rates = yield from _rates(values, options)
    rows += [_Row("workers", n, rate) for n, rate in rates.items()]
    chosen["data.num_workers"] = _fastest(rates, 0)

    # Batches that are made ahead help only beside a step, so these runs train.
    ahead = dict.fromkeys((prefetched, *options.prefetch))
    settings: dict[Any, dict[str, Any]] = {_NAIVE_RUN: naive_overrides}
    settings |= {n: chosen | {"data.prefetch_batches": n} for n in ahead}
    trained = yield from _rates(settings, options, kind="bench")
    naive_rate = trained.pop(_NAIVE_RUN)
    rows[0] = rows[0]._replace(training_rate=naive_rate)
    rows += [_Row("prefetch", n, training_rate=rate) for n, rate in trained.items()]
    prefetch = _fastest(trained, prefetched)
    chosen["data.prefetch_batches"], rate = prefetch, trained[prefetch]
    if _fastest({_NAIVE_RUN: naive_rate, prefetch: rate}, _NAIVE_RUN) == _NAIVE_RUN:
        chosen |= _NAIVE
    sizes = {s: r.values["bytes"] / max(1, r.values["rows"]) for s, r in stored.items()}
    rows = [_add_size(row, initial, sizes) for row in rows]
    return _outcome(rows, compression, block, chosen, rate)


def _plain(name: str) -> str:
    return "" if name == _NO_COMPRESSION else name


def _store(compression: str, block_size: int) -> RunSpec:
    name = f"store-{compression or _NO_COMPRESSION}-{block_size}"
    return RunSpec(name, {"data.compression": compression}, "store", {"block_size": block_size})


def _store_overrides(prepared: RunResult) -> dict[str, Any]:
    """Returns the overrides that read a prepared store."""
    return {"data.store": prepared.values["store"]} | dict(prepared.spec.overrides)


def _rates(
    values: Mapping[Any, Mapping[str, Any]], options: Options, kind: str = "input"
) -> Generator[Sequence[RunSpec], Sequence[RunResult], dict[Any, float | None]]:
    """Measures the values in turns, because the load of a machine varies.

    Args:
        values: {value: overrides}.
        kind: "input" for the input alone, "bench" for training.
    """
    seconds = {"seconds": options.seconds}
    rounds = []
    for turn in range(options.repeats):
        names = [f"{kind}-{_name(kind, value, o)}-{turn}" for value, o in values.items()]
        overrides = zip(names, values.values(), strict=True)
        results = yield [RunSpec(name, dict(o), kind, seconds) for name, o in overrides]
        rounds.append([_rate(result) for result in results])
    measured = [[rate for rate in rates if rate] for rates in zip(*rounds, strict=True)]
    medians = [statistics.median(rates) if rates else None for rates in measured]
    return dict(zip(values, medians, strict=True))


def _name(kind: str, value: Any, overrides: Mapping[str, Any]) -> str:
    """Returns the name of a run: equal runs of different settings have the same."""
    if isinstance(value, tuple):
        return f"{value[0] or _NO_COMPRESSION}-{value[1]}"
    if kind == "bench":
        return value if value == _NAIVE_RUN else f"prefetch-{value}"
    return f"{overrides['data.compression'] or _NO_COMPRESSION}-workers-{value}"


def _rate(result: RunResult) -> float | None:
    return result.examples_per_second if result.is_done else None


def _fastest(rates: Mapping[Any, float | None], current: Any) -> Any:
    """Returns the fastest value, or `current` if no other is clearly faster."""
    best, fastest = current, _BEST * (rates.get(current) or 0.0)
    for value, rate in rates.items():
        if rate is not None and rate > fastest:
            best, fastest = value, rate
    return best


def _add_size(row: _Row, current: str, sizes: Mapping[tuple[str, int], float]) -> _Row:
    store = {
        "compression": (_plain(str(row.value)), _BLOCK),
        "block size": (current, row.value),
    }.get(row.setting)
    return row._replace(size=sizes.get(store)) if store else row


def _outcome(
    rows: Sequence[_Row],
    compression: str,
    block: int,
    chosen: Mapping[str, Any],
    training_rate: float | None,
) -> Outcome:
    """Returns the result.

    Args:
        chosen: the best values. They are the naive ones if no others train faster.
        training_rate: of the fastest input, in examples/s.
    """
    naive = rows[0]
    table = [
        (
            *(row.setting, row.value, row.input_rate),
            row.input_rate / naive.input_rate if row.input_rate and naive.input_rate else None,
            *(row.training_rate, row.size),
        )
        for row in rows
    ]
    gains = (
        f"the input alone {_gain(naive.input_rate, [row.input_rate for row in rows])}, and training"
        f" with it {_gain(naive.training_rate, [training_rate])}"
    )
    gained = f"Compared with one thread and no prefetching, {gains}."
    if naive.training_rate and all(chosen[name] == value for name, value in _NAIVE.items()):
        gained = (
            f"One thread without prefetching is best, because no faster input trains faster here:"
            f" {gains}."
        )
    notes = ["On a slower disk or network, smaller files gain."]
    if block != _BLOCK:
        notes.append(
            f"Blocks of {block:,} examples were the fastest; `prepare` writes blocks of {_BLOCK:,}"
            " and has no field for it."
        )
    best = {name: chosen[name] for name in ("data.num_workers", "data.prefetch_batches")}
    flags = [f"--config.{path}={value}" for path, value in best.items()]
    return Outcome(
        Table(_COLUMNS, table),
        [_panel(name, rows) for name in ("compression", "block size", "workers", "prefetch")],
        [
            gained,
            "Files were read from the memory of this machine, so this is no result about a disk or"
            " a network.",
        ],
        notes,
        [f"--config.data.compression={compression}", *flags],
    )


def _gain(naive: float | None, rates: Sequence[float | None]) -> str:
    best = max((rate for rate in rates if rate), default=0.0)
    if not naive:
        return "could not be measured"
    times = f"{best / naive:.2f} times as fast"
    return f"is {times} ({best:,.0f} against {naive:,.0f} examples/s)"


def _panel(setting: str, rows: Sequence[_Row]) -> Panel:
    shown = [row for row in rows if row.setting == setting]
    label = "training" if setting == "prefetch" else "input alone"
    rates = [row.training_rate if setting == "prefetch" else row.input_rate for row in shown]
    points = [(str(r.value), rate) for r, rate in zip(shown, rates, strict=True) if rate]
    series = Series(label, [x for x, _ in points], [y for _, y in points], style="bars")
    return Panel(setting, setting, "examples/s", [series])


STUDY = Study(
    "input", "throughput of the input over its settings, and the best setting", Options, runs
)
