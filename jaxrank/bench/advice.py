"""Derives from measured rates what limits training, and which setting to change."""

from collections.abc import Mapping
from typing import NamedTuple

from jaxrank.bench.input_stages import PARTS

STAGES = (*PARTS, "transfer", "step")
# Fraction of the step's own rate from which a faster input gains nothing.
ENOUGH = 0.95
_FAR = 10.0  # input over step from which the input does not limit `both`
_SPARE = 1.2  # input over step from which the input is fast enough on average
_SPENT = 0.8  # workers slower than this fraction of one thread cost more than they gain


class Throughput(NamedTuple):
    """Rates in examples/s."""

    input: float
    step: float
    both: float


class Setting(NamedTuple):
    """The fields of the config that affect the input, and the machine.

    cores: of the host, that this process may use.
    on_host: True if these cores are also the devices.
    """

    cores: int
    on_host: bool
    batch_size: int
    steps_per_execution: int
    shards: int
    num_workers: int
    prefetch_batches: int
    window_blocks: int
    compression: str
    direct: bool


def find_limit(rates: Throughput, stages: Mapping[str, float]) -> str:
    """Finds the stage that limits `both`.

    Args:
        stages: seconds per million examples, of each of STAGES alone.
    """
    if rates.both >= ENOUGH * rates.step or rates.input >= _FAR * rates.step:
        return "step"
    # Batches are put one after another. Several workers can make them at the same time.
    if stages["transfer"] * rates.input >= 1e6:
        return "transfer"
    return max(PARTS, key=lambda name: stages[name])


def recommend(limit: str, rates: Throughput, stages: Mapping[str, float], setting: Setting) -> str:
    """Recommends a setting to change, with the numbers behind it."""
    if limit == "step":
        is_less = rates.both < ENOUGH * rates.step
        other = (
            " The rest is other work on the machine or noise: measure longer." if is_less else ""
        )
        return (
            f"The step limits: with real batches it has {rates.both / rates.step:.0%} of its speed"
            f" on one batch, and the input alone makes {rates.input / rates.step:.1f} times as many"
            f" examples.{other} Change the step: a larger batch_size, now {setting.batch_size},"
            " more devices (mesh.devices), or a smaller model."
        )
    if limit == "transfer":
        return (
            f"Putting batches on the devices limits: {1e6 / stages['transfer']:,.0f} examples/s,"
            f" while the input makes {rates.input:,.0f} and the step takes {rates.step:,.0f}."
            f" Increase steps_per_execution, now {setting.steps_per_execution}, to move more bytes"
            " at once. With ragged features, increase data.window_blocks to move fewer bytes."
        )
    total = sum(stages[name] for name in PARTS)
    lead = (
        f"{limit} limits: it takes {stages[limit]:.2f} of the {total:.2f} seconds that one"
        f" thread needs for a million examples. The input alone makes {rates.input:,.0f}"
        f" examples/s, the step takes {rates.step:,.0f}."
    )
    return f"{lead} {_change(limit, rates, stages, setting)}"


def _change(limit: str, rates: Throughput, stages: Mapping[str, float], setting: Setting) -> str:
    one_thread = 1e6 / sum(stages[name] for name in PARTS)
    if setting.num_workers and rates.input < _SPENT * one_thread:
        return (
            "Passing batches between processes costs more than making them: set data.num_workers,"
            f" now {setting.num_workers}, to 0, or increase batch_size, now {setting.batch_size}."
        )
    less_work = _less_work(limit, stages, setting)
    if setting.on_host:  # the automatic choice of data.num_workers is 0 there
        fewer = (
            f" Set data.num_workers, now {setting.num_workers}, to 0: input processes take cores"
            " from the step."
        )
        return (
            f"Input and step share {setting.cores} cores.{fewer * bool(setting.num_workers)}"
            f" {less_work}"
        )
    if rates.input > _SPARE * rates.step:
        return (
            "The input is fast enough on average, but not at all times: set data.prefetch_batches,"
            f" now {setting.prefetch_batches}, to {max(16, 2 * setting.prefetch_batches)}."
        )
    workers = _workers(rates, stages, setting)
    if workers:
        return f"Set data.num_workers, now {setting.num_workers}, to {workers}."
    return f"All {setting.cores} cores of the host are busy. {less_work}"


def _less_work(limit: str, stages: Mapping[str, float], setting: Setting) -> str:
    if limit == "read":
        if setting.direct:
            return "Prepare the data and set data.direct to False: Parquet is decoded on each pass."
        smaller = "lz4"
        if stages["decompress"]:  # a store prepared with another config may use either
            smaller = "zstd" if setting.compression == "lz4" else ""
        if not smaller:
            return "Move data.store to a faster disk."
        return (
            f"Prepare the data with data.compression={smaller!r} to read fewer bytes, or move"
            " data.store to a faster disk."
        )
    if limit == "decompress":
        return (
            "Prepare the data with another data.compression: 'lz4' takes less time than 'zstd', and"
            " '' takes none."
        )
    if limit == "shuffle" and setting.window_blocks > 1:
        return (
            f"Decrease data.window_blocks, now {setting.window_blocks}: a smaller window is"
            " permuted in the cache, but mixes less."
        )
    if setting.on_host:
        return (
            "Fewer columns make the input cheaper: `jaxrank study ablation` measures which features"
            " help. Or add cores to the host."
        )
    return f"Add cores to the host for data.num_workers, now {setting.num_workers}."


def _workers(rates: Throughput, stages: Mapping[str, float], setting: Setting) -> int:
    """Returns the fewest workers that keep the step busy, or else the maximum. 0: no more help."""
    needed = rates.step * sum(stages[name] for name in PARTS) / 1e6
    # Without workers, one thread makes batches ahead of the step if prefetching is on.
    working = setting.num_workers or min(1, setting.prefetch_batches)
    most = min(setting.cores, setting.shards)
    possible = [n for n in range(working + 1, most + 1) if setting.shards % n == 0]
    return next((n for n in possible if n >= needed), possible[-1] if possible else 0)
