"""Trains FuxiCTR's DCN-V2 on MovieLens-1M, and prints a line of JSON after each epoch.

The layers, the loop, the loader and the defaults (early stopping, learning rate reduction on a
plateau) are FuxiCTR's, with the settings of its published run. `time_to_quality.py` starts this
script. The seconds exclude preparation and scoring of the test split.
"""

import argparse
import json
import tempfile
import time
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pyarrow.csv
import torch
from fuxictr.features import FeatureMap
from fuxictr.pytorch.dataloaders.npz_dataloader import NpzDataLoader
from fuxictr.pytorch.layers import CrossNetV2, FeatureEmbedding, MLP_Block
from fuxictr.pytorch.models import BaseModel

from benchmarks.harness.arguments import positive

FEATURES = ("user", "movie", "gender", "age", "occupation", "zip")
DIM = 30
BATCH = 4096


class DCNv2(BaseModel):
    """DCN-V2 with two full cross layers and a parallel tower of [192, 192]."""

    def __init__(self, feature_map: FeatureMap, folder: str):
        super().__init__(
            feature_map,
            model_id="dcnv2",
            monitor="AUC",
            embedding_regularizer=0.005,
            metrics=["AUC", "logloss"],
            model_root=folder,
            verbose=0,
        )
        width = DIM * len(FEATURES)
        self.embedding_layer = FeatureEmbedding(feature_map, DIM)
        self.crossnet = CrossNetV2(width, 2)
        self.tower = MLP_Block(
            input_dim=width,
            output_dim=None,
            hidden_units=[192, 192],
            hidden_activations="ReLU",
            output_activation=None,
            dropout_rates=0.2,
            batch_norm=False,
        )
        self.fc = torch.nn.Linear(width + 192, 1)
        self.compile("adam", "binary_crossentropy", 1e-3)
        self.reset_parameters()
        self.model_to_device()

    def forward(self, inputs):
        x = self.embedding_layer(self.get_inputs(inputs), flatten_emb=True)
        logit = self.fc(torch.cat([self.crossnet(x), self.tower(x)], dim=-1))
        return {"y_pred": self.output_activation(logit)}

    def eval_step(self):
        super().eval_step()
        now = time.perf_counter()
        scores = self.evaluate(self.test, metrics=["AUC", "logloss"])
        self.train()
        seconds = now - self.started
        self.started += time.perf_counter() - now
        record = {"epoch": self._epoch_index + 1, "seconds": seconds, "auc": scores["AUC"]}
        print(json.dumps(record | {"logloss": scores["logloss"]}), flush=True)


def encoded(data: Path, folder: Path) -> dict[str, int]:
    """Writes each split as npz, and returns the rows of each table. Row 0 is the unknown value."""
    options = pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(FEATURES, "string"))
    rows: dict[str, dict[str, int]] = {}
    for split in ("train", "valid", "test"):
        table = pyarrow.csv.read_csv(data / f"ctr_{split}.csv.gz", convert_options=options)
        columns = {"label": table["label"].to_numpy().astype(np.float64)}
        for name in FEATURES:
            values = table[name].to_pylist()
            if split == "train":
                rows[name] = {v: i + 1 for i, v in enumerate(dict.fromkeys(values))}
            columns[name] = np.array([rows[name].get(v, 0) for v in values], np.float64)
        np.savez(folder / f"{split}.npz", **columns)
    return {name: len(known) + 1 for name, known in rows.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--epochs", type=positive, default=30)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = encoded(args.data, folder)
        features = FeatureMap("ml1m", name)
        features.features = OrderedDict(
            (f, {"source": "", "type": "categorical", "vocab_size": rows[f]}) for f in FEATURES
        )
        features.labels, features.default_emb_dim = ["label"], DIM
        features.num_fields = len(FEATURES)
        features.set_column_index()
        (folder / "ml1m").mkdir()
        model = DCNv2(features, name)
        train, valid, test = (
            NpzDataLoader(features, str(folder / split), BATCH, shuffle=split == "train")
            for split in ("train", "valid", "test")
        )
        model.test = test
        model.started = time.perf_counter()
        model.fit(train, epochs=args.epochs, validation_data=valid)


if __name__ == "__main__":
    main()
