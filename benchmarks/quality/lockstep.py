"""Trains DCN-V2 of jaxrank and of FuxiCTR on the same batches; see `parity.py`."""

import math
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks.harness.checkout import ROOT
from jaxrank import json_files
from jaxrank import mesh as meshes
from jaxrank import run as runs
from jaxrank.config_files import load
from jaxrank.embedding.storage import logical_rows
from jaxrank.features import Batch
from jaxrank.layout import Stack, ToTables

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


def widened(x: Any) -> Any:
    """Converts an array of floats to float64."""
    return np.asarray(x, np.float64) if np.issubdtype(x.dtype, np.floating) else x


def jaxrank_steps(
    store: Path, steps: int, changed: dict[str, str], place: Path, double: bool = False
) -> Trace:
    """Trains jaxrank from its initial values, which `double` converts to float64."""
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
    with jax.enable_x64(double):
        if double:
            state = jax.device_put(jax.tree.map(widened, state), run.program.state_sharding)
        for start in range(0, steps, 4):
            batch: Batch = jax.tree.map(np.array, next(run.batches))
            count = min(4, steps - start)
            batches += [(batch.ids[stack.name][i], batch.labels[i, :, 0]) for i in range(count)]
            if double:
                batch = jax.tree.map(widened, batch)
            on_devices = meshes.put_batch(batch, run.program.mesh, leading=1)
            state, metrics = run.program.train(state, on_devices, np.int32(count))
            losses.append(np.asarray(metrics.loss, np.float64)[:count])
        state = jax.device_get(state)
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
        table = np.empty((int((tables == i).sum()), stack.dim), rows.dtype)
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
    wide = jaxrank_steps(store, steps, {}, folder / "float64", double=True)
    assert np.array_equal(wide.labels, equal.labels)
    single, norm = peer_steps(equal, False, folder)
    double, _ = peer_steps(equal, True, folder)
    difference = largest_difference(wide.trained, double)
    print(f"| equal settings in float64 | FuxiCTR in float64 | {difference} |")
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
    curves = {"jaxrank": equal.trained, "jaxrank in float64": wide.trained, **pairs}
    record = {name: trained.losses.tolist() for name, trained in curves.items()}
    json_files.write(folder / "losses.json", record)
