"""Trains FuxiCTR's DCN-V2 on MovieLens-1M, and prints a line of JSON after each epoch.

The layers, the loop, the loader and the defaults (early stopping, learning rate reduction on a
plateau) are FuxiCTR's, by default with the settings of its published run. `time_to_quality.py` and
`board.py` start this script, and `parity.py` trains its model. The seconds exclude preparation and
scoring of the test split.
"""

import argparse
import ast
import json
import tempfile
import time
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow.csv
import torch
from fuxictr.features import FeatureMap
from fuxictr.pytorch.dataloaders.npz_dataloader import NpzDataLoader
from fuxictr.pytorch.layers import CrossNetV2, FeatureEmbedding, MLP_Block
from fuxictr.pytorch.models import BaseModel

from benchmarks.harness.arguments import positive

FEATURES = ("user", "movie", "gender", "age", "occupation", "zip")
# The features of configs/ml1m_board.py, with "genres" as a list.
BOARD_FEATURES = ("user", "movie", "gender", "age", "occupation", "decade", "genres")
MAX_GENRES = 6
BATCH = 4096


class Settings(NamedTuple):
    """Settings of the model and its training, by default those of the published run.

    l2: of whole tables, in every step.
    patience: evaluations without improvement before training stops. Each reduces the learning rate.
    """

    dim: int = 30
    l2: float = 0.005
    cross_layers: int = 2
    mlp_units: tuple[int, ...] = (192, 192)
    dropout: float = 0.2
    patience: int = 2


class DCNv2(BaseModel):
    """DCN-V2 with full cross layers and a parallel tower."""

    def __init__(self, feature_map: FeatureMap, folder: str, settings: Settings):
        super().__init__(
            feature_map,
            model_id="dcnv2",
            monitor="AUC",
            embedding_regularizer=settings.l2,
            metrics=["AUC", "logloss"],
            early_stop_patience=settings.patience,
            model_root=folder,
            verbose=0,
        )
        width = settings.dim * len(feature_map.features)
        self.embedding_layer = FeatureEmbedding(feature_map, settings.dim)
        self.crossnet = CrossNetV2(width, settings.cross_layers)
        self.tower = MLP_Block(
            input_dim=width,
            output_dim=None,
            hidden_units=list(settings.mlp_units),
            hidden_activations="ReLU",
            output_activation=None,
            dropout_rates=settings.dropout,
            batch_norm=False,
        )
        self.fc = torch.nn.Linear(width + settings.mlp_units[-1], 1)
        self.compile("adam", "binary_crossentropy", 1e-3)
        self.reset_parameters()
        self.model_to_device()

    def forward(self, inputs):
        x = self.embedding_layer(self.get_inputs(inputs), flatten_emb=True)
        logit = self.fc(torch.cat([self.crossnet(x), self.tower(x)], dim=-1))
        return {"y_pred": self.output_activation(logit)}

    def eval_step(self):
        valid = self.evaluate(self.valid_gen, metrics=["AUC", "logloss"])
        self.checkpoint_and_earlystop(valid)
        now = time.perf_counter()
        scores = self.evaluate(self.test, metrics=["AUC", "logloss"])
        self.train()
        seconds = now - self.started
        self.started += time.perf_counter() - now
        record = {"epoch": self._epoch_index + 1, "seconds": seconds, "auc": scores["AUC"]}
        record |= {"logloss": scores["logloss"]}
        record |= {"valid_auc": valid["AUC"], "valid_logloss": valid["logloss"]}
        print(json.dumps(record), flush=True)


def encoded(data: Path, folder: Path, features: tuple[str, ...] = FEATURES) -> dict[str, int]:
    """Writes each split as npz, and returns the rows of each table. Row 0 is the unknown value."""
    options = pyarrow.csv.ConvertOptions(
        column_types=dict.fromkeys((*FEATURES, "genres"), "string")
    )
    rows: dict[str, dict[str, int]] = {}
    for split in ("train", "valid", "test"):
        table = pyarrow.csv.read_csv(data / f"ctr_{split}.csv.gz", convert_options=options)
        columns = {"label": table["label"].to_numpy().astype(np.float64)}
        for name in features:
            if name == "decade":
                values = (table["year"].to_numpy() // 10).tolist()
            elif name == "genres":
                values = [genre for text in table[name].to_pylist() for genre in text.split("|")]
            else:
                values = table[name].to_pylist()
            if split == "train":
                rows[name] = {v: i + 1 for i, v in enumerate(dict.fromkeys(values))}
            ids = np.array([rows[name].get(v, 0) for v in values], np.float64)
            if name == "genres":
                lengths = [text.count("|") + 1 for text in table[name].to_pylist()]
                places = np.arange(MAX_GENRES) < np.array(lengths)[:, None]
                columns[name] = np.zeros(places.shape)
                columns[name][places] = ids
            else:
                columns[name] = ids
        np.savez(folder / f"{split}.npz", **columns)
    return {name: len(known) + 1 for name, known in rows.items()}


def feature_map(rows: dict[str, int], dim: int, folder: str) -> FeatureMap:
    """Makes the description of features with tables of these numbers of rows."""
    features = FeatureMap("ml1m", folder)
    features.features = OrderedDict(
        (name, {"source": "", "type": "categorical", "vocab_size": count})
        for name, count in rows.items()
    )
    if "genres" in rows:
        features.features["genres"] |= {
            "type": "sequence",
            "max_len": MAX_GENRES,
            "padding_idx": 0,
            "feature_encoder": "layers.MaskedAveragePooling()",
        }
    features.labels, features.default_emb_dim = ["label"], dim
    features.num_fields = len(rows)
    features.set_column_index()
    (Path(folder) / "ml1m").mkdir(exist_ok=True)
    return features


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--epochs", type=positive, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--board", action="store_true", help="the features of board.py")
    for name, value in Settings()._asdict().items():
        kind = ast.literal_eval if isinstance(value, tuple) else type(value)
        parser.add_argument(f"--{name}", type=kind, default=value)
    args = parser.parse_args()
    settings = Settings(*(getattr(args, name) for name in Settings._fields))
    torch.manual_seed(args.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = encoded(args.data, folder, BOARD_FEATURES if args.board else FEATURES)
        features = feature_map(rows, settings.dim, name)
        model = DCNv2(features, name, settings)
        train, valid, test = (
            NpzDataLoader(features, str(folder / split), BATCH, shuffle=split == "train")
            for split in ("train", "valid", "test")
        )
        model.test = test
        model.started = time.perf_counter()
        model.fit(train, epochs=args.epochs, validation_data=valid)


if __name__ == "__main__":
    main()
