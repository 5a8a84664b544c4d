"""Steps of other trainers on the shapes of `data.py`. `benchmarks/step/cpu.py` starts this script.

All use huge pages like jaxrank's processes, and run layers eagerly, except TensorFlow's function.
They train DCN-V2 with three full cross layers and a parallel tower of 400-400-400. Layers use Adam.
Batches are in memory in the format of each program.

torch_dense: nn.Embedding with dense gradients, and Adam on the tables too.
torch: sparse gradients of one table with all rows, AdaGrad. EmbeddingBag for lists.
fbgemm: SplitTableBatchedEmbeddingBags with exact row-wise AdaGrad, the tables of TorchRec.
tensorflow: gather, sum of duplicates, the sparse kernel of AdaGrad.
fuxictr: FuxiCTR's layers and trainer, with its update of tables: Adam on all rows. It also embeds
    each float in a vector, so its layers read 16 numbers per float.

The suffix `_bfloat16` means bfloat16 products. fbgemm_tables has no layers.
"""

import argparse
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.harness.in_turn import serve
from benchmarks.step.data import (
    BATCH,
    BATCHES,
    CROSS_LAYERS,
    DIM,
    FLOATS,
    HIDDEN,
    LIST_ROWS,
    MAX_LENGTH,
    SHAPES,
    TABLES,
    Raw,
    merge_tables,
    raw,
)
from jaxrank.runtime import huge_pages

ID_ROWS = sum(TABLES)


def batches(shape: str) -> list[Raw]:
    data = raw(shape, BATCHES * BATCH)
    ends = np.append(0, data.lengths.sum(axis=1).cumsum())
    parts = []
    for i in range(BATCHES):
        part = slice(i * BATCH, (i + 1) * BATCH)
        values = data.values[ends[part.start] : ends[part.stop]]
        parts.append(
            Raw(data.floats[part], data.ids[part], data.lengths[part], values, data.labels[part])
        )
    return parts


def torch_layers(width: int):
    import torch

    class Layers(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.cross = torch.nn.ModuleList(
                torch.nn.Linear(width, width) for _ in range(CROSS_LAYERS)
            )
            sizes = (width, *HIDDEN)
            self.tower = torch.nn.ModuleList(
                torch.nn.Linear(a, b) for a, b in zip(sizes, HIDDEN, strict=False)
            )
            self.head = torch.nn.Linear(width + HIDDEN[-1], 1)

        def forward(self, x0):
            x, deep = x0, x0
            for layer in self.cross:
                x = x0 * layer(x) + x
            for layer in self.tower:
                deep = torch.relu(layer(deep))
            return self.head(torch.cat([x, deep], dim=1))[:, 0]

    return Layers()


def torch_steps(
    shape: str, read_vectors: Callable, make: Callable, optimizers: list, bfloat16: bool
) -> Iterator[int]:
    """Trains with PyTorch layers.

    vectors_of: maps the result of `make` for a batch to vectors f[B, width].
    optimizers: of the tables.
    """
    import torch

    lists = SHAPES[shape]
    layers = torch_layers(FLOATS + DIM * (len(TABLES) + lists))
    optimizers = [*optimizers, torch.optim.Adam(layers.parameters(), lr=1e-3, fused=True)]
    prepared = [
        (make(b), torch.from_numpy(b.floats), torch.from_numpy(b.labels)) for b in batches(shape)
    ]
    loss_function = torch.nn.BCEWithLogitsLoss()
    while True:
        for inputs, floats, labels in prepared:
            vectors = read_vectors(inputs)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bfloat16):
                logits = layers(torch.cat([floats, vectors], dim=1))
            loss = loss_function(logits.float(), labels)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            loss.item()
            yield BATCH


def torch_(shape: str, bfloat16: bool, sparse: bool = True) -> Iterator[int]:
    import torch

    lists = SHAPES[shape]
    ids = torch.nn.Embedding(ID_ROWS, DIM, sparse=sparse)
    tables: list[Any] = [ids]
    if lists:
        bags = torch.nn.EmbeddingBag(lists * LIST_ROWS, DIM, mode="sum", sparse=sparse)
        tables.append(bags)
    for table in tables:
        torch.nn.init.normal_(table.weight, std=0.01)
    weights = [table.weight for table in tables]
    optimizer = (
        torch.optim.Adagrad(weights, lr=0.05)
        if sparse
        else torch.optim.Adam(weights, lr=1e-3, fused=True)
    )

    def make(batch: Raw):
        places, values = merge_tables(batch)
        starts = np.append(0, batch.lengths.reshape(-1).cumsum())[:-1]
        return tuple(map(torch.from_numpy, (places, values, starts)))

    def read_vectors(inputs):
        places, values, starts = inputs
        vectors = [ids(places).reshape(BATCH, -1)]
        if lists:
            vectors.append(bags(values, starts).reshape(BATCH, -1))
        return torch.cat(vectors, dim=1)

    return torch_steps(shape, read_vectors, make, [optimizer], bfloat16)


def fbgemm_parts(shape: str):
    """Returns the tables and a function that gives their input: values by table, and offsets."""
    import torch
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    lists = SHAPES[shape]
    tables = SplitTableBatchedEmbeddingBagsCodegen(
        [
            (rows, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU)
            for rows in (*TABLES, *[LIST_ROWS] * lists)
        ],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=0.05,
        eps=1e-8,
    )
    tables.init_embedding_weights_uniform(-0.01, 0.01)

    def make(batch: Raw):
        number = np.tile(np.arange(lists), BATCH).repeat(batch.lengths.reshape(-1))
        values = [batch.values[number == i] for i in range(lists)]
        lengths = np.concatenate(
            [np.ones(batch.ids.size, np.int64), batch.lengths.T.reshape(-1)], dtype=np.int64
        )
        return (
            torch.from_numpy(np.concatenate([batch.ids.T.reshape(-1), *values])),
            torch.from_numpy(np.append(0, lengths.cumsum())),
        )

    return tables, make


def fbgemm(shape: str, bfloat16: bool) -> Iterator[int]:
    tables, make = fbgemm_parts(shape)
    return torch_steps(shape, lambda inputs: tables(*inputs), make, [], bfloat16)


def fbgemm_tables(shape: str, bfloat16: bool) -> Iterator[int]:
    import torch

    tables, make = fbgemm_parts(shape)
    prepared = [make(b) for b in batches(shape)]
    width = DIM * (len(TABLES) + SHAPES[shape])
    gradient = torch.from_numpy(
        np.random.default_rng(1).normal(size=(BATCH, width)).astype(np.float32) * 1e-4
    )
    while True:
        for inputs in prepared:
            tables(*inputs).backward(gradient)
            yield BATCH


def tensorflow(shape: str, bfloat16: bool) -> Iterator[int]:
    import tensorflow as tf

    lists = SHAPES[shape]
    width = FLOATS + DIM * (len(TABLES) + lists)
    shapes = [(ID_ROWS, DIM)] + [(lists * LIST_ROWS, DIM)] * bool(lists)
    tables = [tf.Variable(tf.random.normal(s, stddev=0.01)) for s in shapes]
    sums = [tf.Variable(tf.fill(s, 0.1)) for s in shapes]
    sizes = [(width, width)] * CROSS_LAYERS
    sizes += list(zip((width, *HIDDEN), HIDDEN, strict=False)) + [(width + HIDDEN[-1], 1)]
    kernels = [tf.Variable(tf.random.normal(s, stddev=(2 / sum(s)) ** 0.5)) for s in sizes]
    biases = [tf.Variable(tf.zeros(s[1])) for s in sizes]
    layers = kernels + biases
    adam = tf.keras.optimizers.Adam(1e-3)
    adam.build(layers)

    def dense(x, layer):
        if bfloat16:
            x, kernel = tf.cast(x, tf.bfloat16), tf.cast(kernels[layer], tf.bfloat16)
            return tf.cast(x @ kernel, tf.float32) + biases[layer]
        return x @ kernels[layer] + biases[layer]

    input_shapes: list[Any] = [
        (BATCH, len(TABLES)),
        (None,),
        (None,),
        (BATCH, FLOATS),
        (BATCH,),
    ]
    dtypes = [tf.int64] * 3 + [tf.float32] * 2

    @tf.function(input_signature=list(map(tf.TensorSpec, input_shapes, dtypes)))
    def step(places, values, bags, floats, labels):
        with tf.GradientTape() as tape:
            vectors = [floats, tf.reshape(tf.gather(tables[0], places), (BATCH, -1))]
            if lists:
                of_lists = tf.gather(tables[1], values)
                summed = tf.math.segment_sum(of_lists, bags)
                missing = BATCH * lists - tf.shape(summed)[0]
                vectors.append(tf.reshape(tf.pad(summed, [[0, missing], [0, 0]]), (BATCH, -1)))
            x0 = tf.concat(vectors, axis=1)
            x, deep = x0, x0
            for layer in range(CROSS_LAYERS):
                x = x0 * dense(x, layer) + x
            for layer in range(CROSS_LAYERS, len(sizes) - 1):
                deep = tf.nn.relu(dense(deep, layer))
            logits = dense(tf.concat([x, deep], axis=1), len(sizes) - 1)[:, 0]
            losses = tf.nn.sigmoid_cross_entropy_with_logits(labels, logits)
            loss = tf.reduce_mean(losses)
        gradients = tape.gradient(loss, tables + layers)
        for table, sum_, gradient in zip(tables, sums, gradients, strict=False):
            unique, number = tf.unique(tf.reshape(gradient.indices, [-1]))
            of_row = tf.reshape(gradient.values, (-1, DIM))
            tf.raw_ops.ResourceSparseApplyAdagradV2(
                var=table.handle,
                accum=sum_.handle,
                lr=0.05,
                epsilon=1e-8,
                grad=tf.math.unsorted_segment_sum(of_row, number, tf.size(unique)),
                indices=unique,
            )
        adam.apply(gradients[len(tables) :], layers)
        return loss

    def make(batch: Raw):
        bags = np.arange(BATCH * lists).repeat(batch.lengths.reshape(-1))
        arrays = (*merge_tables(batch), bags, batch.floats, batch.labels)
        return tuple(map(tf.constant, arrays))

    prepared = [make(b) for b in batches(shape)]
    while True:
        for inputs in prepared:
            step(*inputs).numpy()
            yield BATCH


def fuxictr(shape: str, bfloat16: bool) -> Iterator[int]:
    import torch
    from fuxictr.features import FeatureMap
    from fuxictr.pytorch.layers import CrossNetV2, FeatureEmbedding, MLP_Block
    from fuxictr.pytorch.models import BaseModel

    lists = SHAPES[shape]
    features = OrderedDict(
        {f"f{i}": {"source": "", "type": "numeric"} for i in range(FLOATS)}
        | {
            f"c{i}": {"source": "", "type": "categorical", "vocab_size": rows + 1}
            for i, rows in enumerate(TABLES)
        }
        | {
            f"l{i}": {
                "source": "",
                "type": "sequence",
                "vocab_size": LIST_ROWS + 1,
                "max_len": MAX_LENGTH,
                "padding_idx": 0,
                "feature_encoder": "layers.MaskedSumPooling()",
            }
            for i in range(lists)
        }
    )

    class DCNv2(BaseModel):
        def __init__(self, feature_map: Any, folder: str):
            super().__init__(
                feature_map, model_id="dcnv2", metrics=["AUC"], model_root=folder, verbose=0
            )
            # FuxiCTR embeds each float in a vector, as published.
            width = DIM * feature_map.num_fields
            self.embedding_layer = FeatureEmbedding(feature_map, DIM)
            self.crossnet = CrossNetV2(width, CROSS_LAYERS)
            self.tower = MLP_Block(
                input_dim=width, hidden_units=list(HIDDEN), hidden_activations="ReLU"
            )
            self.fc = torch.nn.Linear(width + HIDDEN[-1], 1)
            self.compile("adam", "binary_crossentropy", 1e-3)

        def forward(self, inputs):
            x = self.embedding_layer(self.get_inputs(inputs), flatten_emb=True)
            y = self.fc(torch.cat([self.crossnet(x), self.tower(x)], dim=-1))
            return {"y_pred": self.output_activation(y)}

    def make(batch: Raw):
        padded = np.zeros((BATCH, lists, MAX_LENGTH), np.int64)
        padded[np.arange(MAX_LENGTH) < batch.lengths[:, :, None]] = batch.values + 1
        columns = {f"f{i}": torch.from_numpy(batch.floats[:, i].copy()) for i in range(FLOATS)}
        columns |= {f"c{i}": torch.from_numpy(batch.ids[:, i] + 1) for i in range(len(TABLES))}
        columns |= {f"l{i}": torch.from_numpy(padded[:, i].copy()) for i in range(lists)}
        return columns | {"label": torch.from_numpy(batch.labels)}

    with tempfile.TemporaryDirectory() as folder:
        fields = FeatureMap("criteo", folder)
        fields.features, fields.labels, fields.default_emb_dim = features, ["label"], DIM
        fields.num_fields = len(features)
        fields.set_column_index()
        model = DCNv2(fields, folder)
        model._max_gradient_norm = 10.0
        prepared = [make(b) for b in batches(shape)]
        model.train()
        while True:
            for columns in prepared:
                model.train_step(columns)
                yield BATCH


PEERS: dict[str, Callable[..., Iterator[int]]] = {
    "torch": torch_,
    "torch_dense": lambda shape, bfloat16: torch_(shape, bfloat16, sparse=False),
    "fbgemm": fbgemm,
    "fbgemm_tables": fbgemm_tables,
    "tensorflow": tensorflow,
    "fuxictr": fuxictr,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("peer")
    parser.add_argument("--shape", choices=SHAPES, required=True)
    args = parser.parse_args()
    huge_pages.ensure()
    name = args.peer.removesuffix("_bfloat16")
    # Warms up until all rows of the tables are in memory. Adam on all rows needs few steps for it.
    warm = 2 if name in ("torch_dense", "fuxictr") else BATCHES
    serve(lambda: PEERS[name](args.shape, args.peer != name), warm * BATCH)


if __name__ == "__main__":
    main()
