"""A bundle of every kind of feature, with random weights."""

import json
import os
import shutil

import pytest
from every_feature import config, write
from jaxrank_serving.bundle import checksum, seal
from ml_collections import ConfigDict
from runs import nothing, saved

from jaxrank.export.bundle import export_bundle
from jaxrank.export.comparison import parity
from jaxrank.export.signature import Requests


def export_sample(folder):
    """Exports a run to `folder / "ads"` and returns that path. `user` is of the context."""
    c = config(write(folder / "raw"))
    c.model.parents = ConfigDict({"buy": "click"})
    c.mesh.devices = 1
    saved(c, folder / "run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parity, "_REPEATS", dict.fromkeys(parity.CANDIDATES, 2))
        requests = Requests(("us*",), {"age": 30})
        export_bundle(
            str(folder / "run"), output=str(folder / "ads"), requests=requests, report=nothing
        )
    return folder / "ads"


def other_version(bundle, folder):
    """Copies a bundle and changes its card, so that it is another version."""
    shutil.copytree(bundle, folder)
    card = folder / "model_card.md"
    card.write_text(card.read_text() + "Newer.\n")
    tree = json.loads((folder / "manifest.json").read_text())
    tree["files"][card.name] |= {"bytes": card.stat().st_size, "checksum": checksum(card)}
    tree["checksum"] = seal(tree)
    (folder / "manifest.json").write_text(json.dumps(tree))
    return folder


def point(link, target):
    """Makes or replaces a symbolic link atomically."""
    link.with_name("next").symlink_to(target)
    os.replace(link.with_name("next"), link)


CONTEXT = {"user": "u1"}
CANDIDATE = {
    "f0": "1.5",
    "f1": "-20",
    "item": "i2",
    "pair": "p1|p2",
    "code": "x3",
    "number": "4",
    "age": "33",
    "seen": "i1|i2",
    "tags": "t1|t2",
    "tag_weights": "0.5|1",
}


def candidates(count):
    """Returns candidates with different values."""
    return [
        CANDIDATE
        | {
            "item": f"i{i % 9}",
            "f0": str(i / 7),
            "number": str(i % 40),
            "seen": "i3|" * (i % 3) + "i1",
        }
        for i in range(count)
    ]
