"""Plans the placement of tables: replicated, or split by row with replicated hottest rows.

The plan depends on the frequency of rows in a sample. The decisive number of a row is the
probability that a device reads it in a step. A row that nearly every device reads costs no more
when it is replicated, with its gradient summed over all devices, than when its vector and gradient
are sent. Such rows also cause the imbalance between devices.

Rows that are read less often, but not rarely, are split. They are distributed over the devices in
the order of that probability, see `layout.ReplicatedRows`.
"""

import collections
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxrank.embedding.backends.tpu import TpuLayout
from jaxrank.embedding.storage import storage
from jaxrank.features import RESERVED_ROWS, Schema, Table
from jaxrank.layout import Layout, ReplicatedRows, stack_name
from jaxrank.placement.frequency import chance, falling
from jaxrank.placement.traffic import TableReads, Traffic
from jaxrank.validate import matched

# Tables of at most this number of rows are replicated: splitting 4 KiB gains nothing.
SMALL_TABLE = 64
# Rows that a device reads with at least this probability are replicated. Summing the gradient of a
# row over the devices moves as many bytes as sending its vector and its gradient once.
REPLICATE_FROM = 0.9
# Rows that a device reads with at least this probability are distributed one by one. Rarer rows are
# numerous enough on each device to be spread evenly by chance.
DEAL_FROM = 0.03
# Maximum hot rows of a stack: each is a number in every program that maps ids to rows.
MAX_HOT_ROWS = 65_536
_MAX_REPORTED_TABLES = 5  # maximum number of tables that a warning names


class TablePlan(NamedTuple):
    """The placement of one table.

    placement: "replicated" or "rows".
    reason: the reason of the placement, to print.
    replicated_rows: number of its rows, from the first, that every device keeps.
    unique: expected number of distinct split rows of it that one device reads in a step.
    """

    name: str
    rows: int
    dim: int
    placement: str
    reason: str
    replicated_rows: int
    unique: float


class Plan(NamedTuple):
    """The placement of all tables.

    hot: by stack, for `layout.layout`.
    unique: {stack: expected number of distinct split rows that one device reads in a step}.
    tables: in the order of the schema.
    warnings: lines to print.
    """

    hot: dict[str, ReplicatedRows]
    unique: dict[str, float]
    tables: tuple[TablePlan, ...]
    warnings: tuple[str, ...]


class _Candidate(NamedTuple):
    """A table before the hot rows of its stack are chosen.

    placement: "replicated", or "rows", which may still get hot rows.
    chances: f64[rows read], the probability of each row in `reads`.
    hot: f64[h], falling: smoothed counts of the first rows, which may become hot rows.
    """

    table: Table
    dim: int
    reads: TableReads
    placement: str
    reason: str
    chances: np.ndarray
    hot: np.ndarray


def placements(names: Sequence[str], default: str, patterns: Mapping[str, str]) -> dict[str, str]:
    """Resolves the placement that a config requests for each table.

    Args:
        names: names of the tables.
        default: `embedding.placement`.
        patterns: `embedding.placements`. Later patterns win.

    Raises:
        InputError: a pattern matches no table.
    """
    asked = matched("embedding.placements", "table", names, patterns)
    return dict.fromkeys(names, default) | asked


def make_plan(
    schema: Schema,
    dim_of: Mapping[str, int],
    traffic: Traffic,
    *,
    devices: int,
    share: int,
    placement_of: Mapping[str, str],
    hot: Mapping[str, ReplicatedRows] | None = None,
) -> Plan:
    """Plans the placement of a schema's tables. Equal arguments give equal plans.

    Args:
        dim_of: {table: dimension}.
        traffic: the reads of a sample of the training data.
        devices: number of devices of the mesh.
        share: number of examples of a batch per device.
        placement_of: {table: placement that the config requests}, see `placements`.
        hot: the rows of an earlier placement, which is kept.
    """
    candidates = [
        _candidate(t, dim_of[t.name], traffic, devices, share, placement_of[t.name])
        for t in schema.tables
    ]
    if hot is None:
        hot = {
            stack_name(dim): _hot([c for c in candidates if c.dim == dim], traffic.examples, share)
            for dim in sorted(set(dim_of.values()))
        }
    else:
        candidates = [_kept(c, hot.get(stack_name(c.dim), ReplicatedRows())) for c in candidates]
    replicated: collections.Counter[str] = collections.Counter()
    for chosen in hot.values():
        replicated.update(chosen.hot_rows[: chosen.replicated])
    tables = tuple(_table_plan(c, replicated[c.table.name]) for c in candidates)
    unique = {stack_name(dim): 0.0 for dim in dim_of.values()}
    for table in tables:
        unique[stack_name(table.dim)] += table.unique
    return Plan(dict(hot), unique, tables, tuple(_warnings(candidates)))


def _kept(candidate: _Candidate, hot: ReplicatedRows) -> _Candidate:
    whole = candidate.table.name in hot.replicated_tables
    placement = "replicated" if whole else "rows"
    return candidate._replace(placement=placement, reason="decided when the run started")


def _candidate(
    table: Table, dim: int, traffic: Traffic, devices: int, share: int, asked: str
) -> _Candidate:
    reads = traffic.tables[table.name]
    chances = chance(reads.counts, traffic.examples, share)
    candidate = _Candidate(table, dim, reads, "rows", "", chances, np.zeros(0))
    if devices == 1:
        return candidate._replace(reason="there is one device")
    if asked != "auto":
        return candidate._replace(placement=asked, reason="set by the config")
    if table.rows <= SMALL_TABLE:
        return candidate._replace(placement="replicated", reason=f"at most {SMALL_TABLE} rows")
    first = _first_counts(table, reads)
    first_chances = chance(first, traffic.examples, share)
    if len(first) == table.rows and first_chances[-1] >= REPLICATE_FROM:
        return candidate._replace(
            placement="replicated",
            reason=f"each row is read by {REPLICATE_FROM:.0%} of the devices in each step",
        )
    return candidate._replace(hot=first[first_chances >= DEAL_FROM])


def _first_counts(table: Table, reads: TableReads) -> np.ndarray:
    """Computes smoothed counts f64[k], falling, of rows 0, 1, ..., as far as they can be hot."""
    counts = np.zeros(min(table.rows, MAX_HOT_ROWS), np.int64)
    in_range = reads.rows < len(counts)
    counts[reads.rows[in_range]] = reads.counts[in_range]
    # The rows of missing and unknown values come first, whatever their frequency.
    reserved = 0 if table.encoding == "integer" else min(RESERVED_ROWS, len(counts) - 1)
    smooth = np.concatenate([counts[:reserved], falling(counts[reserved:])])
    for row in reversed(range(reserved)):
        smooth[row] = max(smooth[row], smooth[row + 1])
    return smooth


def _hot(candidates: Sequence[_Candidate], examples: int, share: int) -> ReplicatedRows:
    """Merges the hot rows of a stack's tables by falling counts."""
    whole = tuple(c.table.name for c in candidates if c.placement == "replicated")
    counts = np.concatenate([np.zeros(0), *(c.hot for c in candidates)])
    owner = np.repeat(np.arange(len(candidates)), [len(c.hot) for c in candidates])
    order = np.argsort(-counts, kind="stable")[:MAX_HOT_ROWS]
    merged = tuple(candidates[i].table.name for i in owner[order].tolist())
    chances = chance(counts[order], examples, share)
    return ReplicatedRows(whole, merged, int(np.count_nonzero(chances >= REPLICATE_FROM)))


def _table_plan(candidate: _Candidate, replicated: int) -> TablePlan:
    table, reason = candidate.table, candidate.reason
    whole = candidate.placement == "replicated"
    if not reason and replicated:
        rows = "row" if replicated == 1 else "rows"
        reason = (
            f"the hottest {replicated:,} {rows} on every device: read by {REPLICATE_FROM:.0%} of"
            " the devices in each step"
        )
    elif not reason:
        reason = f"no row is read by {REPLICATE_FROM:.0%} of the devices in each step"
    split = candidate.reads.rows >= (table.rows if whole else replicated)
    return TablePlan(
        name=table.name,
        rows=table.rows,
        dim=candidate.dim,
        placement=candidate.placement,
        reason=reason,
        replicated_rows=table.rows if whole else replicated,
        unique=float(candidate.chances[split].sum()),
    )


def _warnings(candidates: Sequence[_Candidate]) -> Iterator[str]:
    """Warns once of hot rows that are not at the front of a table, so that they are split."""
    missed = {c.table: count for c in candidates if (count := _missed(c))}
    if not missed:
        return
    first = sorted(missed, key=lambda table: -missed[table])
    names = [f"{table.name} ({missed[table]:,})" for table in first[:_MAX_REPORTED_TABLES]]
    more = f" and {len(first) - len(names)} more" if len(first) > len(names) else ""
    is_hashed = any(table.encoding == "hash" for table in first)
    yield (
        f"rows that {REPLICATE_FROM:.0%} of the devices read in each step are not among the first"
        f" of their table, so they are split: {', '.join(names)}{more}. Number rows by falling"
        " frequency, for example with encoding='vocabulary'."
        f"{' Hashed rows have no order and stay split.' if is_hashed else ''}"
    )


def _missed(candidate: _Candidate) -> int:
    """Returns the number of hot rows that are not at the front of a table."""
    if candidate.reason:
        return 0
    hot = candidate.reads.rows[candidate.chances >= REPLICATE_FROM]
    return int(np.count_nonzero(hot >= len(candidate.hot)))


def capacity(unique: float, shards: int, slack: float, most: int, unit: int) -> int:
    """Computes the number of ids that one device can send to another in one round of the exchange.

    It is the mean plus `slack` standard deviations of a Poisson distribution.

    Args:
        unique: expected number of distinct split rows that one device reads in a step.
        shards: number of devices that the rows are split over.
        slack: `embedding.exchange_slack`.
        most: maximum number of ids that a device can send to another.
        unit: the result is a multiple of it.
    """
    mean = unique / shards
    wanted = min(mean + slack * math.sqrt(mean), most)
    return unit * max(1, math.ceil(wanted / unit))


def capacities(
    layout: Layout,
    unique: Mapping[str, float],
    ids: Mapping[str, int],
    *,
    devices: int,
    shards: int,
    slack: float,
    fixed: int,
) -> dict[str, int]:
    """Computes {stack with split rows: ids per exchange buffer}. {} on one device.

    Args:
        unique: `Plan.unique`.
        ids: {stack: number of ids in a device's share of a batch}.
        fixed: `embedding.exchange_capacity`. 0: computed from `unique`.
    """
    by_stack = {}
    for stack in layout.stacks:
        split = storage(stack).split
        if devices > 1 and split:
            most = min(ids[stack.name], split.rows // shards)
            unit = TpuLayout(split.dim, split.width).buffer_unit  # at least RowLayout's
            by_stack[stack.name] = (
                capacity(fixed * shards, shards, 0, most, unit)
                if fixed
                else capacity(unique[stack.name], shards, slack, most, unit)
            )
    return by_stack
