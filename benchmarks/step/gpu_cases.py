"""Published shapes of recommendation models, with ids drawn by a power law of exponent 1.05."""

import dataclasses
import importlib.util
import itertools
from collections.abc import Iterator
from typing import NamedTuple

from ml_collections import ConfigDict

from benchmarks.harness.checkout import ROOT
from jaxrank.config import default

# Tables of the Criteo Kaggle data, with a limit for the largest ones: 32.7 M rows in total.
CRITEO_32M = (
    1460, 583, 9_071_000, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5_683, 8_351_593, 3_194, 27,
    14_992, 5_461_306, 10, 5_652, 2_173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572,
)  # fmt: skip


class Feature(NamedTuple):
    """A feature with `ids` ids per example in one table, whose vectors are summed."""

    table: int
    ids: int


RATE = 1e-5  # few batches are repeated: training with a normal learning rate would overflow


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A model and its batch.

    tables: (rows, dim) of each.
    config: model, optimizers and batch size. Its features are not read.
    target: of the step on one H200, as text.
    """

    tables: tuple[tuple[int, int], ...]
    features: tuple[Feature, ...]
    floats: int
    config: ConfigDict
    target: str

    @property
    def ids(self) -> int:
        """Number of ids per example."""
        return sum(f.ids for f in self.features)

    @property
    def width(self) -> int:
        """Number of inputs of the layers."""
        floats = (self.floats, *self.config.model.dense_mlp_units)[-1]
        return floats + sum(self.tables[f.table][1] for f in self.features)

    @property
    def rows(self) -> int:
        return sum(rows for rows, _ in self.tables)

    def scaled(self, scale: float) -> "Case":
        """Returns the case with fewer rows and smaller batches, for tests without a GPU."""
        config = self.config.copy_and_resolve_references()
        config.batch_size = max(512, int(config.batch_size * scale) // 512 * 512)
        tables = tuple((max(2, int(rows * scale)), dim) for rows, dim in self.tables)
        return dataclasses.replace(self, tables=tables, config=config)

    def products(self) -> Iterator[tuple[int, int]]:
        """Yields (in, out) of every matrix product of the model."""
        model = self.config.model
        yield from itertools.pairwise((self.floats, *model.dense_mlp_units))
        for _ in range(model.cross_layers if model.cross == "dcn_v2_low_rank" else 0):
            yield self.width, model.cross_rank
            yield model.cross_rank, self.width
        sizes = (self.width, *model.mlp_units, 1)
        yield from itertools.pairwise(sizes)


def _single(rows: tuple[int, ...], dim: int) -> tuple[tuple, tuple]:
    return tuple((r, dim) for r in rows), tuple(Feature(i, 1) for i in range(len(rows)))


def _config(batch_size: int, mlp_units: tuple[int, ...], tables: str) -> ConfigDict:
    c = default()
    c.batch_size, c.model.mlp_units, c.model.cross = batch_size, mlp_units, "none"
    c.model.precision, c.optim.tables.name = "bfloat16", tables
    return _set_learning_rate(c)


def _set_learning_rate(c: ConfigDict) -> ConfigDict:
    for optimizer in (c.optim.dense, c.optim.tables):
        optimizer.base_learning_rate, optimizer.scaling = RATE, "none"
    return c


def mlperf(batch_size: int) -> Case:
    path = ROOT / "configs" / "mlperf.py"
    spec = importlib.util.spec_from_file_location("mlperf", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = _set_learning_rate(module.get_config("dcnv2"))
    config.batch_size, config.optim.tables.name = batch_size, "rowwise_adagrad"
    tables, _ = _single(tuple(rows for rows, _ in module.FEATURES), 128)
    features = tuple(Feature(i, ids) for i, (_, ids) in enumerate(module.FEATURES))
    return Case(tables, features, 13, config, "2.0 M examples/s")


def tiny_v3() -> Case:
    """NVIDIA's synthetic model, in which three tables are read twice: by one id and by ten ids."""
    shared = ((10_000, 8), (1_000_000, 16), (25_000_000, 16))
    single = (
        ((25_000_000, 16),)
        + ((10, 8),) * 16
        + ((1_000, 8),) * 10
        + ((10_000, 8),) * 4
        + ((100_000, 16),) * 2
        + ((1_000_000, 16),) * 19
    )
    features = tuple(Feature(i, ids) for i in range(len(shared)) for ids in (1, 10))
    features += tuple(Feature(len(shared) + i, 1) for i in range(len(single)))
    config = _config(65_536, (256, 128), "adagrad")
    return Case(shared + single, features, 10, config, "8 ms per step")


def criteo(precision: str = "bfloat16") -> Case:
    config = _config(65_536, (1024, 1024, 512, 256), "lazy_adam")
    config.model.cross, config.model.cross_layers, config.model.cross_rank = (
        "dcn_v2_low_rank",
        3,
        512,
    )
    config.model.precision = precision
    return Case(*_single(CRITEO_32M, 128), 13, config, "3.5 M examples/s")


def tables_only() -> Case:
    """A model of one unit with 1,048,570 ids per step."""
    config = _config(104_857, (), "rowwise_adagrad")
    return Case(*_single((1_680_000,) * 10, 128), 1, config, "1.0 ms, tables alone")


CASES = {
    "mlperf-65536": lambda: mlperf(65_536),
    "mlperf-55296": lambda: mlperf(55_296),
    "tiny-v3": tiny_v3,
    "criteo": criteo,
    "criteo-mixed": lambda: criteo("mixed_bfloat16"),
    "tables": tables_only,
}
