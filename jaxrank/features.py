"""What the data is: names, sizes and lengths of features, and the Batch that a step consumes.

NumPy only: the input workers import this module and must not import JAX.

What the odd values mean, once for the whole system:

- A missing float is 0 after its transforms (the mean, where it is standardised). A feature with
  `missing_indicator` has a second column that is 1 where the value was missing.
- Under all encodings but `integer` a table has two rows of its own in front: row 0 for a missing
  value, row 1 for one that a vocabulary does not have (never seen, or seen less than `min_count`
  times). Values of a vocabulary follow by falling frequency, those that later data added behind
  them; hashed values are anywhere behind row 1.
- Under `integer` encoding the data holds row numbers. A missing one is PAD: its vector is zero and
  nothing is updated.
- An empty list, like a missing one, has the vector zero under every combiner.
- An empty label is unknown: its example has weight 0 for that task.
- A number that is put into buckets (`bucket` encoding) has row 2 + the number of its bucket; a
  missing one has row 0.
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

# Out of range for every table, so a lookup reads zeros and an update is dropped.
# Never -1: JAX wraps negative indices.
PAD = np.int32(2**31 - 1)

MISSING_ROW = 0  # of a table under another encoding than integer
UNKNOWN_ROW = 1
RESERVED_ROWS = 2

# The most examples whose lists are packed together. A store keeps the largest sums of list lengths
# over runs of this many, wherever they begin: the room that an evaluation has, as it cuts nothing.
MAX_GROUP = 512

# Of tasks; see `Task`.
KINDS = ("binary", "real", "count")


@dataclasses.dataclass(frozen=True)
class Task:
    """One thing to predict; `kind` says what it is, and so which loss and metrics the task has.

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
    """A float column, and the transform that made it: (x - mean) / std, of x or of its log.

    log: sign(x) log(1 + |x|) comes first.
    mean, std: of the training data after `log`; 0 and 1 where nothing is standardised. Equal
        columns were made by equal transforms, and only such data fits a model.
    """

    name: str
    log: bool = False
    mean: float = 0.0
    std: float = 1.0


@dataclasses.dataclass(frozen=True)
class Categorical:
    """A fixed number of ids an example; each of the `length` ids has a vector of its own."""

    name: str
    table: str
    length: int = 1


@dataclasses.dataclass(frozen=True)
class Ragged:
    """A list of ids of any length, empty included, combined to one vector or kept as a sequence.

    combiner, for vectors e and weights w (1 unless `weighted`): sum: sum(w e);
    mean: sum(w e) / sum(w); sqrtn: sum(w e) / sqrt(sum(w^2)); none: the vectors themselves, for
    models that attend over them, a place for each of the first `length` ids.
    length: most ids of a list under "none", 0 under the others.
    """

    name: str
    table: str
    combiner: str = "mean"
    weighted: bool = False
    length: int = 0

    @property
    def has_plain_sums(self) -> bool:
        """Whether vectors are added up as they are."""
        return self.combiner == "sum" and not self.weighted


@dataclasses.dataclass(frozen=True)
class Table:
    """A vocabulary and so an embedding table: `rows` counts the reserved rows, if any.

    encoding: "vocabulary", "hash", "integer" or "bucket".
    checksum: of what decides the rows of values, as the vocabulary in row order; equal tables mean
        equal rows.
    """

    name: str
    rows: int
    encoding: str
    checksum: str = ""


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
        """The feature of each column of the id matrix: a Categorical of length 3 has three."""
        return [f for f in self.categorical for _ in range(f.length)]

    @property
    def logit_correction_columns(self) -> int:
        """Columns of `Batch.logit_correction`."""
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
    """What one step consumes: NumPy on the host, JAX arrays on the devices.

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
        all traffic; of the examples as they are here, which have lost negatives, they are `logits -
        logit_correction`.
    """

    dense: Any
    ids: dict[str, Any]
    lists: dict[str, Lists]
    labels: Any
    weights: Any
    dropped: Any
    logit_correction: Any
