"""Schema of the data: names, sizes and lengths of features, and the Batch that a step consumes.

NumPy only: the input workers import this module and must not import JAX.

Special values have the same meaning in the whole system:

- A missing float is 0 after its transforms (the mean, where it is standardised). A feature with
  `missing_indicator` has a second column that is 1 where the value was missing.
- Under all encodings except `integer` a table starts with two reserved rows. Row 0 is for a missing
  value. Row 1 is for a value that is not in the vocabulary (never seen, or seen less than
  `min_count` times). Values of a vocabulary follow by falling frequency, then values that later
  data added, without those that were evicted. Hashed values have any row after row 1.
- Under `integer` encoding the data holds row numbers. A missing one is PAD: its vector is zero and
  nothing is updated.
- An empty list, like a missing one, has the vector zero under every combiner.
- An empty label is unknown: its example has weight 0 for that task.
- A number in buckets (`bucket` encoding) has row 2 + the number of its bucket. A missing one has
  row 0.
"""

import dataclasses
import re
from typing import Any, NamedTuple

import numpy as np

# Out of range for every table, so a lookup reads zeros and an update is dropped.
# Never -1: JAX wraps negative indices.
PAD = np.int32(2**31 - 1)

MISSING_ROW = 0  # of a table under another encoding than integer
UNKNOWN_ROW = 1
RESERVED_ROWS = 2

INDICATOR = ":missing"  # end of the name of an indicator of missing values
_INDEX = re.compile(r"\[\d+\]$")  # end of the name of a number of a vector

# Maximum number of examples whose lists are packed together. A store keeps the largest sums of list
# lengths over this many consecutive examples. Evaluation sizes its buffers by them, because it
# drops no ids.
MAX_GROUP = 512

# Of tasks; see `Task`.
KINDS = ("binary", "real", "count")
RANKED_KINDS = ("binary", "count")  # kinds whose examples can be ordered within a request


@dataclasses.dataclass(frozen=True)
class Task:
    """A quantity to predict. Its `kind` decides the loss and the metrics.

    kind: binary: 0 or 1, and the model's output is the logit of its probability;
        real: any finite number, and the output is its prediction;
        count: a whole number, 0 or more, and the output is the log of the expected one.
    shifted: its examples have a logit correction; see `Batch`.
    """

    name: str
    kind: str = "binary"
    shifted: bool = False


@dataclasses.dataclass(frozen=True)
class Dense:
    """A float column and its transform: (x - mean) / std, of x or of its log.

    log: whether sign(x) log(1 + |x|) is applied first.
    mean, std: of the training data after `log`; 0 and 1 without standardisation. A model can only
        read data whose columns have the same transforms.
    """

    name: str
    log: bool = False
    mean: float = 0.0
    std: float = 1.0


@dataclasses.dataclass(frozen=True)
class Categorical:
    """A fixed number of ids per example. Each of the `length` ids has its own vector."""

    name: str
    table: str
    length: int = 1


@dataclasses.dataclass(frozen=True)
class Ragged:
    """A list of ids of any length, empty included, combined to one vector or kept as a sequence.

    combiner, for vectors e and weights w (1 unless `weighted`): sum: sum(w e);
    mean: sum(w e) / sum(w); sqrtn: sum(w e) / sqrt(sum(w^2)); none: the vectors themselves, for
    models that attend over them, a place for each of the first `length` ids.
    length: maximum number of ids of a list under "none"; 0 under the others.
    sequence: name of the sequence that it is part of. The lists of a sequence have equal lengths,
        and their n-th ids are of one event, the newest event first. Empty: none.
    """

    name: str
    table: str
    combiner: str = "mean"
    weighted: bool = False
    length: int = 0
    sequence: str = ""

    @property
    def has_plain_sums(self) -> bool:
        """True if the combiner is a sum without weights."""
        return self.combiner == "sum" and not self.weighted


@dataclasses.dataclass(frozen=True)
class Table:
    """A vocabulary and its embedding table. `rows` includes the reserved rows, if any.

    encoding: "vocabulary", "hash", "integer" or "bucket".
    checksum: of everything that maps values to rows, such as the vocabulary in row order. Equal
        tables map values to equal rows.
    """

    name: str
    rows: int
    encoding: str
    checksum: str = ""


def indicator_of(name: str) -> str:
    """Returns the name of the dense feature that is 1 where the dense feature `name` is missing."""
    return f"{name}{INDICATOR}"


def column_of(name: str) -> str:
    """Returns the name of the column that a dense feature or an indicator belongs to.

    The numbers of a vector column "v" are the dense features "v[0]", "v[1]" and so on.
    """
    return _INDEX.sub("", name.removesuffix(INDICATOR))


@dataclasses.dataclass(frozen=True)
class Schema:
    """The columns of a store, in the order of its matrices. Features may share a table.

    JSON holds it as an object of its fields, which `validate.parse` reads.
    """

    tasks: tuple[Task, ...]
    dense: tuple[Dense, ...]
    categorical: tuple[Categorical, ...]
    ragged: tuple[Ragged, ...]
    tables: tuple[Table, ...]

    @property
    def id_columns(self) -> list[Categorical]:
        """Returns the feature of each column of the id matrix. One of length 3 has 3 columns."""
        return [f for f in self.categorical for _ in range(f.length)]

    def indicator(self, name: str) -> int | None:
        """Returns the index in `dense` of the indicator of a dense feature, None without one."""
        names = [f.name for f in self.dense]
        indicator = indicator_of(name)
        return names.index(indicator) if indicator in names else None

    @property
    def logit_correction_columns(self) -> int:
        """Number of columns of `Batch.logit_correction`."""
        return len(self.tasks) if any(t.shifted for t in self.tasks) else 0


class Lists(NamedTuple):
    """The combined ragged features of one stack, packed: groups of consecutive examples, each
    group's ids one after another, example by example and within an example list by list.

    ids: i32[groups, capacity] rows of the stack, PAD behind the last.
    segments: i32[groups, capacity] `example_in_group * lists + list`, rising; PAD behind the last.
    weights: f32[groups, capacity] the combiner's factor of each id, 0 behind the last. Not read if
        all lists of the stack have plain sums, where each is 1.
    """

    ids: Any
    segments: Any
    weights: Any


class Batch(NamedTuple):
    """Input of one step: NumPy arrays on the host, JAX arrays on the devices.

    Every array's first axis is split over the devices in order. Keys are names of stacks (see
    `layout.Layout`); a stack that no such feature uses has no key.

    dense: f32[B, dense], nothing missing.
    ids: {stack: i32[B, places]} rows of the stack, or PAD: the stack's id columns, then for each of
        its sequences as many places as it has `length`, its ids in front and PAD behind.
    lists: {stack: Lists}.
    labels: f32[B, tasks], 0 where unknown.
    weights: f32[B, tasks], 0 where the label is unknown and in examples that only fill the batch.
    dropped: i32[groups, lists] list ids that did not fit and were cut, in the order of
        `Schema.ragged`.
    logit_correction: f32[B, tasks] the log of the rate at which negatives like the example were
        kept, 0 where all were; without columns where no task has a logit correction. Logits are of
        all traffic. Logits of the examples as stored, with downsampled negatives, are `logits -
        logit_correction`.
    requests: i32[B], the number of each example's request within its group, and PAD in examples
        that only fill the group. Empty if examples have no requests.
    """

    dense: Any
    ids: dict[str, Any]
    lists: dict[str, Lists]
    labels: Any
    weights: Any
    dropped: Any
    logit_correction: Any
    requests: Any = ()
