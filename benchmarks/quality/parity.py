"""Compares jaxrank's DCN-V2 with FuxiCTR's on MovieLens-1M, step by step and over whole runs.

    python -m benchmarks.quality.parity steps --data=../shared/data/ml1m --workdir=/tmp/parity
    python -m benchmarks.quality.parity runs --data=../shared/data/ml1m --workdir=/tmp/parity

It needs the extra `bench`. Both programs have the settings of FuxiCTR's published run, with
dropout 0 in `steps`, because the masks of the programs differ.

steps: jaxrank trains on its batches. FuxiCTR's model starts from a copy of its initial values and
trains on the same batches with FuxiCTR's `train_step`, in float32 and in float64. The largest
difference of the loss over the steps is printed, and that of the weights after the last one. Each
further line, with --causes, changes one setting of jaxrank to another value (VARIANTS).

runs: each program starts from its own initial values, makes its own batches, stops early, and
scores the test split at the checkpoint with the best validation AUC. The program prints mean,
deviation and the difference over --seeds with a 95% interval. --causes adds RUNS.

--rows is the number of training rows: all, or the first of them, such as 59121. The validation
split then has an eighth of it. The test split is never cut.
"""

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from scipy import stats

from benchmarks.harness.arguments import positive, run_main
from benchmarks.harness.checkout import ROOT, environment
from benchmarks.quality import movielens
from benchmarks.quality.seeds import prepare_once
from jaxrank import mesh as meshes
from jaxrank import run as runs
from jaxrank.config_files import load
from jaxrank.embedding.storage import logical_rows
from jaxrank.evaluation.evaluate import evaluate
from jaxrank.features import Batch
from jaxrank.layout import Stack, ToTables
from jaxrank.metrics import run_intervals
from jaxrank.train import train

CONFIG = ROOT / "configs" / "ml1m_dcnv2.py"
# The settings of `peers.Settings`, without averages of weights and without a base rate.
EQUAL = {
    "embedding.dim": "30",
    "embedding.init_std": "0.0001",
    "embedding.l2": "0.005",
    "model.initial_bias": "{'like': 0.0}",
    "ema_decay": "0.0",
    "data.num_workers": "0",
}
# {cause: settings of jaxrank that differ}. In `steps` FuxiCTR keeps the equal settings.
VARIANTS = {
    "equal settings": {},
    "outputs start at the base rate": {"model.initial_bias": "{}"},
    "vectors start at a deviation of 0.01": {"embedding.init_std": "0.01"},
    "L2 of the rows of a batch": {"embedding.l2_scope": "read"},
    "eps of Adam 1e-7": {
        "optim.dense.settings": "{'eps': 1e-7}",
        "optim.tables.settings": "{'eps': 1e-7}",
    },
}
RUNS = {
    "jaxrank, equal settings": {},
    "jaxrank, outputs start at the base rate": {"model.initial_bias": "{}"},
    "jaxrank, no cut of the learning rate, patience 5": {
        "eval.reduce_lr_patience": "0",
        "eval.early_stopping_patience": "5",
    },
    "jaxrank, as before, with averaged weights": {
        "eval.reduce_lr_patience": "0",
        "eval.early_stopping_patience": "5",
        "ema_decay": "0.999",
    },
}


class Trained(NamedTuple):
    """Losses f64[steps] of the batches before each update, and the last weights by name."""

    losses: np.ndarray
    weights: dict[str, np.ndarray]


class Trace(NamedTuple):
    """A run of jaxrank. ids: {feature: i64[steps, B]} rows of its table. labels: f32[steps, B]."""

    trained: Trained
    initial: dict[str, np.ndarray]
    ids: dict[str, np.ndarray]
    labels: np.ndarray


def flags(settings: dict[str, str]) -> list[str]:
    return [f"--config.{name}={value}" for name, value in settings.items()]


def jaxrank_steps(store: Path, steps: int, changed: dict[str, str], place: Path) -> Trace:
    settings = EQUAL | {
        "data.store": str(store),
        "model.dropout": "0.0",
        "num_epochs": "0.0",
        "num_steps": str(steps),
        "steps_per_execution": "4",
    }
    config = load(CONFIG, flags(settings | changed))
    run = runs.build(config, place, lambda _: None)
    layout = run.program.step_spec.embedding.layout
    (stack,) = layout.stacks
    state = run.first_state(lambda _: None)
    initial = weights(state, stack)
    losses, batches = [], []
    for start in range(0, steps, 4):
        batch: Batch = jax.tree.map(np.array, next(run.batches))
        count = min(4, steps - start)
        on_devices = meshes.put_batch(batch, run.program.mesh, leading=1)
        state, metrics = run.program.train(state, on_devices, np.int32(count))
        losses.append(np.asarray(metrics.loss, np.float64)[:count])
        batches += [(batch.ids[stack.name][i], batch.labels[i, :, 0]) for i in range(count)]
    run.batches.close()
    run.checkpoints.close()
    rows = np.stack([ids for ids, _ in batches])
    _, in_table = ToTables.from_stack(stack)(rows.reshape(-1))
    names = [f.name for f in layout.schema.id_columns]
    by_feature = np.moveaxis(in_table.reshape(rows.shape), 2, 0)
    ids = {name: column.astype(np.int64) for name, column in zip(names, by_feature, strict=True)}
    labels = np.stack([labels for _, labels in batches])
    return Trace(Trained(np.concatenate(losses), weights(state, stack)), initial, ids, labels)


def weights(state: Any, stack: Stack) -> dict[str, np.ndarray]:
    """Returns the dense parameters and the tables of a state, by name."""
    paths, _ = jax.tree.flatten_with_path(state.params)
    arrays = {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.array(value)
        for path, value in paths
    }
    rows = logical_rows({name: table.rows for name, table in state.tables.items()}, stack)
    tables, in_table = ToTables.from_stack(stack)(np.arange(stack.rows, dtype=np.int32))
    for i, name in enumerate(stack.tables):
        table = np.empty((int((tables == i).sum()), stack.dim), np.float32)
        table[in_table[tables == i]] = rows[tables == i]
        arrays[f"tables/{name}"] = table
    return arrays


def peer_steps(trace: Trace, double: bool, folder: Path) -> tuple[Trained, float]:
    """Trains FuxiCTR's model on the batches of a trace; returns also the largest gradient norm."""
    import torch

    from benchmarks.quality import peers

    dtype = torch.float64 if double else torch.float32

    class Recorded(peers.DCNv2):
        def get_labels(self, inputs: Any) -> Any:
            return super().get_labels(inputs).to(dtype)

        def add_loss(self, return_dict: Any, y_true: Any) -> Any:
            loss = super().add_loss(return_dict, y_true)
            losses.append(loss.item())
            return loss

    losses: list[float] = []
    settings = peers.Settings(dropout=0.0)
    rows = {name: len(trace.initial[f"tables/{name}"]) for name in trace.ids}
    model = Recorded(peers.feature_map(rows, settings.dim, str(folder)), str(folder), settings)
    model.to(dtype).train()
    model._max_gradient_norm = 10.0  # the default of FuxiCTR's `fit`
    places = _places(model, settings, trace.ids)
    with torch.no_grad():
        for name, parameter in places.items():
            value = torch.from_numpy(trace.initial[name])
            parameter.copy_(value.T if name.endswith("kernel") else value)
    largest = 0.0
    for step, labels in enumerate(trace.labels):
        batch = {name: torch.from_numpy(ids[step]) for name, ids in trace.ids.items()}
        model.train_step(batch | {"label": torch.from_numpy(labels)})
        norm = math.sqrt(sum(float((p.grad**2).sum()) for p in model.parameters()))
        largest = max(largest, norm)
    arrays = {
        name: (p.T if name.endswith("kernel") else p).detach().numpy().copy()
        for name, p in places.items()
    }
    return Trained(np.array(losses), arrays), largest


def _places(model: Any, settings: Any, features: Any) -> dict[str, Any]:
    """Returns {name of jaxrank's array: parameter of FuxiCTR's model}."""
    layers = {
        f"cross/layer_{i}": model.crossnet.cross_layers[i] for i in range(settings.cross_layers)
    }
    linear = [m for m in model.tower.mlp if hasattr(m, "weight")]
    layers |= {f"tower/layer_{i}": layer for i, layer in enumerate(linear)} | {"head": model.fc}
    places = {f"{name}/kernel": layer.weight for name, layer in layers.items()}
    places |= {f"{name}/bias": layer.bias for name, layer in layers.items()}
    embeddings = model.embedding_layer.embedding_layer.embedding_layers
    return places | {f"tables/{name}": embeddings[name].weight for name in features}


def largest_difference(a: Trained, b: Trained) -> str:
    losses = np.abs(a.losses - b.losses)
    weights = max(float(np.abs(a.weights[name] - b.weights[name]).max()) for name in b.weights)
    return f"{losses.max():.1e} at step {losses.argmax() + 1} | {weights:.1e}"


def compare_steps(store: Path, steps: int, causes: bool, folder: Path) -> None:
    print("| jaxrank | compared with | largest difference of the loss | of a weight at the end |")
    print("| --- | --- | ---: | ---: |")
    traces = {
        name: jaxrank_steps(store, steps, changed, folder / f"steps{i}")
        for i, (name, changed) in enumerate(VARIANTS.items())
        if causes or not changed
    }
    equal = traces["equal settings"]
    single, norm = peer_steps(equal, False, folder)
    double, _ = peer_steps(equal, True, folder)
    pairs = {"FuxiCTR in float32": single, "FuxiCTR in float64": double}
    for name, other in pairs.items():
        print(f"| equal settings | {name} | {largest_difference(equal.trained, other)} |")
    print(f"| FuxiCTR in float32 | FuxiCTR in float64 | {largest_difference(single, double)} |")
    for name, trace in traces.items():
        if trace is not equal:
            assert np.array_equal(trace.labels, equal.labels), name
            difference = largest_difference(trace.trained, double)
            print(f"| {name} | FuxiCTR in float64 | {difference} |")
    print(f"Largest norm of a gradient of FuxiCTR: {norm:.3f}; it clips from 10 on.")
    by_step = np.abs(equal.trained.losses - double.losses)
    print("Differences of equal settings by step:", " ".join(f"{d:.1e}" for d in by_step[::10]))
    record = {
        name: trained.losses.tolist()
        for name, trained in {"jaxrank": equal.trained, **pairs}.items()
    }
    (folder / "losses.json").write_text(json.dumps(record))


def difference(a: list[float], b: list[float]) -> str:
    """Formats the difference of the means with Welch's interval, as seeds do not make pairs."""
    low, high = stats.ttest_ind(a, b, equal_var=False).confidence_interval(0.95)
    return run_intervals.Interval(float(np.mean(a) - np.mean(b)), low, high).text("+.5f")


def jaxrank_run(store: Path, seed: int, changed: dict[str, str], place: Path) -> dict[str, float]:
    """Trains one run of jaxrank, and returns its test metrics."""
    settings = EQUAL | {
        "seed": str(seed),
        "data.store": str(store),
        "eval.early_stopping_patience": "2",
        "eval.reduce_lr_patience": "1",
    }
    config = load(CONFIG, flags(settings | changed))
    train(config, place, report=lambda _: None, quiet=True, page=False)
    scored = evaluate(str(place), checkpoint="best", split="test")
    return {name: scored.metrics["like"][name] for name in ("auc", "logloss")}


def peer_run(data: Path, seed: int, epochs: int) -> dict[str, float]:
    script = Path(__file__).with_name("peers.py")
    done = subprocess.run(
        [sys.executable, str(script), f"--data={data}", f"--seed={seed}", f"--epochs={epochs}"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=environment(),
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return max(lines, key=lambda line: line["valid_auc"])


def compare_runs(
    data: Path, store: Path, rows: int, seeds: int, causes: bool, folder: Path
) -> None:
    steps = math.ceil(rows / 4096)  # of FuxiCTR's epoch, whose last batch is partial
    epochs = 100 if steps < 100 else 30
    length = {
        "num_epochs": "0.0",
        "num_steps": str(steps * epochs),
        "steps_per_execution": str(steps),
        "log_every_steps": str(steps),
        "eval.every_steps": str(steps),
    }

    def results() -> Iterator[tuple[str, list[dict[str, float]]]]:
        yield "FuxiCTR", [kept("FuxiCTR", seed, {}) for seed in range(seeds)]
        for name, changed in list(RUNS.items())[: None if causes else 1]:
            yield name, [kept(name, seed, length | changed) for seed in range(seeds)]

    def kept(name: str, seed: int, settings: dict[str, str]) -> dict[str, float]:
        place = folder / name.replace(" ", "_").replace(",", "") / f"seed{seed}"
        record = place / "scores.json"
        if not record.exists():
            place.mkdir(parents=True, exist_ok=True)
            if name == "FuxiCTR":
                scores = peer_run(data, seed, epochs)
            else:
                scores = jaxrank_run(store, seed, settings, place / "run")
            record.write_text(json.dumps(scores))
        return json.loads(record.read_text())

    print("| program | seeds | test AUC | test logloss | AUC minus FuxiCTR's | logloss |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    peer: list[dict[str, float]] = []
    for name, scores in results():
        peer = peer or scores
        cells = [name, str(len(scores))]
        for metric in ("auc", "logloss"):
            values = [score[metric] for score in scores]
            cells.append(f"{np.mean(values):.5f} ({np.std(values, ddof=1):.5f})")
        for metric in ("auc", "logloss"):
            a, b = ([score[metric] for score in side] for side in (scores, peer))
            cells.append("" if scores is peer else difference(a, b))
        print("| " + " | ".join(cells) + " |", flush=True)


def prepared(data: Path, folder: Path, rows: int) -> tuple[Path, Path]:
    """Returns the folder of the raw files with this number of training rows, and their store."""
    if rows:
        tenth = folder / f"rows{rows}"
        tenth.mkdir(parents=True, exist_ok=True)
        for split in movielens.SPLITS:
            table = movielens.read(data / f"ctr_{split}.csv.gz")
            if split != "test":
                table = table.slice(0, rows if split == "train" else rows // 8)
            movielens.write(table, tenth / f"ctr_{split}.csv.gz")
        data = tenth
    files = [
        f"--config.source.files.{split}={data.absolute() / f'ctr_{split}.csv.gz'}"
        for split in movielens.SPLITS
    ]
    store = folder / f"data{rows}"
    prepare_once(str(CONFIG), store, files)
    return data, store


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("mode", choices=("steps", "runs"))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--workdir", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=0, help="training rows; 0: all")
    parser.add_argument("--steps", type=positive, default=100)
    parser.add_argument("--causes", action="store_true", help="with all of VARIANTS or RUNS")
    parser.add_argument("--seeds", type=positive, default=3)
    args = parser.parse_args()
    folder = args.workdir.absolute() / f"{args.mode}{args.rows}"
    folder.mkdir(parents=True, exist_ok=True)
    data, store = prepared(args.data, args.workdir.absolute(), args.rows)
    if args.mode == "steps":
        compare_steps(store, args.steps, args.causes, folder)
    else:
        compare_runs(data, store, args.rows or 591_209, args.seeds, args.causes, folder)


if __name__ == "__main__":
    run_main(main)
