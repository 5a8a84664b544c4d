"""Whether the input keeps up with the step: real batches beside one batch again and again.

    python benchmarks/overlap.py

Of DCN-V2 as papers have it on Criteo's shape (13 floats, 26 ids, three full cross layers, a tower
of 400-400-400, vectors of 16) with 8 lists besides; of the model of configs/quickstart.py; and of a
near-empty one: one table of 100 rows, one layer of 8 units, 13 floats. There a step costs next to
nothing, so what is measured is what input and transfer sustain. The loop is that of `jaxrank
train`, without evaluation and saving. Both are measured in turn, round by round; the ratio is the
median of the rounds.
"""

import argparse
import contextlib
import functools
import tempfile
from pathlib import Path

import jax
import numpy as np
from counts import positive
from ml_collections import ConfigDict
from step_data import LIST_ROWS, LISTS
from step_data import TABLES as CRITEO

from jaxrank import config as configs
from jaxrank import config_files
from jaxrank import mesh as meshes
from jaxrank import run as jobs
from jaxrank.bench import measure as bench
from jaxrank.runtime import huge_pages
from jaxrank.runtime.prefetch import Feed

QUICKSTART = Path(__file__).resolve().parent.parent / "configs" / "quickstart.py"


def dcnv2() -> ConfigDict:
    c = configs.default()
    lists = [dict(rows=LIST_ROWS, mean_length=8, weighted=False)] * LISTS
    c.source = ConfigDict(
        dict(kind="synthetic", rows=dict(train=0), seed=1, floats=13, ids=CRITEO, exponent=1.05)
    )
    c.source.lists = lists
    c.features.tasks = [dict(name="click", label="click")]
    c.features.floats = [dict(columns="f*", standardize=True)]
    c.features.ids = [
        dict(columns=f"c{i}", encoding="integer", rows=rows) for i, rows in enumerate(CRITEO)
    ]
    c.features.lists = [
        dict(columns=f"l{i}", encoding="integer", rows=LIST_ROWS) for i in range(LISTS)
    ]
    c.embedding.dim = 16
    c.model.cross, c.model.cross_layers, c.model.hidden = "matrix", 3, (400, 400, 400)
    return c


def near_empty() -> ConfigDict:
    c = configs.default()
    c.source = ConfigDict(dict(kind="synthetic", rows=dict(train=0), seed=1, floats=13, ids=[100]))
    c.features.tasks = [dict(name="click", label="click")]
    c.features.floats = [dict(columns="f*", standardize=True)]
    c.features.ids = [dict(columns="c0", encoding="integer", rows=100)]
    c.embedding.dim = 4
    c.model.cross, c.model.hidden = "none", (8,)
    return c


CASES = {
    "dcnv2": dcnv2,
    "quickstart": lambda: config_files.load(QUICKSTART),
    "near-empty": near_empty,
}


def measure(config: ConfigDict, folder: Path, seconds: float) -> dict[str, np.ndarray]:
    """Examples a second of input, input and transfer, step, and both; the last two by round."""
    job = jobs.build(config, folder, report=lambda text: None)
    call = config.batch_size * config.steps_per_call
    ahead = bench.ahead(config)
    put = functools.partial(meshes.put_batch, mesh=job.program.mesh, leading=1)
    with contextlib.closing(job.batches):
        made = bench.calls_per_second(job.batches, ahead, seconds / 4)
        batch = put(next(job.batches))
        with contextlib.closing(Feed(job.batches, put)) as feed:
            there = map(jax.block_until_ready, feed)
            fed = bench.calls_per_second(there, ahead, seconds / 4)
            rounds = bench.Loop(job).compare(batch, feed, ahead / made, seconds)
    again, both = (call * np.array(rates) for rates in zip(*rounds, strict=True))
    return {"input": call * made, "fed": call * fed, "again": again, "both": both}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=positive, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each of the two")
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--batch-size", type=positive, default=4096)
    args = parser.parse_args()
    huge_pages.ensure()
    with tempfile.TemporaryDirectory() as folder:
        for name in args.models:
            config = CASES[name]()
            config.source.rows.train = args.rows
            config.batch_size, config.data.valid = args.batch_size, ""
            config.num_epochs, config.num_steps = 0.0, 2**24
            found = measure(config, Path(folder) / name, args.seconds)
            ratio = found["both"] / found["again"]
            print(
                f"{name}: input {found['input']:,.0f} examples/s, input and transfer"
                f" {found['fed']:,.0f}, one batch again and again {np.median(found['again']):,.0f},"
                f" real batches {np.median(found['both']):,.0f};\n  ratio {np.median(ratio):.3f},"
                f" {np.quantile(ratio, 0.25):.3f} to {np.quantile(ratio, 0.75):.3f} in the middle"
                f" half of {len(ratio)} rounds"
            )


if __name__ == "__main__":
    main()
