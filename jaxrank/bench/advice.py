"""From measured rates: what limits training, and which setting to change."""

from collections.abc import Mapping
from typing import NamedTuple

from jaxrank.bench.input_stages import PARTS

STAGES = (*PARTS, "transfer", "step")
# Of the step's own rate: from here on nothing is gained by a faster input.
ENOUGH = 0.95
_FAR = 10.0  # input so much faster than the step is not what a missing part of `both` comes from
_SPARE = 1.2  # input so much faster than the step is fast enough on average
_SPENT = 0.8  # workers that make less than this share of what one thread makes


class Throughput(NamedTuple):
    """Examples a second."""

    input: float
    step: float
    both: float


class Setting(NamedTuple):
    """The fields of the config that the input depends on, and the machine.

    cores: of the host, that this process may use.
    on_host: whether these cores are the devices, too.
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


def limit_of(rates: Throughput, stages: Mapping[str, float]) -> str:
    """The stage that bounds `both`.

    Args:
        stages: seconds for a million examples, of each of STAGES alone.
    """
    if rates.both >= ENOUGH * rates.step or rates.input >= _FAR * rates.step:
        return "step"
    # Batches are put one after another; they may be made by several workers at once.
    if stages["transfer"] * rates.input >= 1e6:
        return "transfer"
    return max(PARTS, key=lambda name: stages[name])


def advice_on(limit: str, rates: Throughput, stages: Mapping[str, float], setting: Setting) -> str:
    """What to change, with the numbers that say so."""
    if limit == "step":
        is_less = rates.both < ENOUGH * rates.step
        other = (
            " The rest is other work on the machine, or noise: measure longer." if is_less else ""
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
            f" where the input makes {rates.input:,.0f} and the step takes {rates.step:,.0f}. Set"
            f" steps_per_execution, now {setting.steps_per_execution}, higher, so that more bytes"
            f" move at"
            " once; where lists are packed, data.window_blocks higher, so that fewer do."
        )
    total = sum(stages[name] for name in PARTS)
    lead = (
        f"{limit} limits: it takes {stages[limit]:.2f} of the {total:.2f} seconds in which one"
        f" thread makes a million examples; the input alone makes {rates.input:,.0f} examples/s,"
        f" the step takes {rates.step:,.0f}."
    )
    return f"{lead} {_change(limit, rates, stages, setting)}"


def _change(limit: str, rates: Throughput, stages: Mapping[str, float], setting: Setting) -> str:
    one_thread = 1e6 / sum(stages[name] for name in PARTS)
    if setting.num_workers and rates.input < _SPENT * one_thread:
        return (
            "Batches cost more to pass from process to process than to make: set data.num_workers,"
            f" now {setting.num_workers}, to 0, or a larger batch_size, now {setting.batch_size}."
        )
    less_work = _less_work(limit, stages, setting)
    if rates.input > _SPARE * rates.step:
        if setting.on_host:
            return f"Input and step share {setting.cores} cores. {less_work}"
        return (
            "It is fast enough on average, but not at all times: set data.prefetch_batches, now"
            f" {setting.prefetch_batches}, to {max(16, 2 * setting.prefetch_batches)}."
        )
    workers = _workers(rates, stages, setting)
    if workers:
        return f"Set data.num_workers, now {setting.num_workers}, to {workers}."
    return f"The host's {setting.cores} cores are at work. {less_work}"


def _less_work(limit: str, stages: Mapping[str, float], setting: Setting) -> str:
    if limit == "read":
        if setting.direct:
            return "Prepare the data and set data.direct to False: Parquet is decoded on each pass."
        smaller = "lz4"
        if stages["decompress"]:  # a store that was prepared by another config may be of either
            smaller = "zstd" if setting.compression == "lz4" else ""
        if not smaller:
            return "Keep data.store on a faster disk."
        return (
            f"Prepare the data with data.compression={smaller!r}, so that there is less to read, or"
            " keep data.store on a faster disk."
        )
    if limit == "decompress":
        return (
            "Prepare the data with another data.compression: 'lz4' takes less time than 'zstd', and"
            " '' none."
        )
    if limit == "shuffle" and setting.window_blocks > 1:
        return (
            f"Set data.window_blocks, now {setting.window_blocks}, lower: a smaller window is"
            " permuted in the cache, but mixes less."
        )
    return f"Give the host more cores for data.num_workers, now {setting.num_workers}."


def _workers(rates: Throughput, stages: Mapping[str, float], setting: Setting) -> int:
    """The fewest workers that keep the step busy, or as many as there can be; 0: no more can."""
    needed = rates.step * sum(stages[name] for name in PARTS) / 1e6
    # Without workers one thread makes batches ahead of the step, if any are made ahead.
    working = setting.num_workers or min(1, setting.prefetch_batches)
    most = min(setting.cores, setting.shards)
    possible = [n for n in range(working + 1, most + 1) if setting.shards % n == 0]
    return next((n for n in possible if n >= needed), possible[-1] if possible else 0)
