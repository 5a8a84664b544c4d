"""Writes blocks of a test in the format of `prepare`."""

from collections.abc import Iterable
from typing import Any

from jaxrank.data.examples import Examples
from jaxrank.data.store.reader import StoreSpec
from jaxrank.data.store.writer import SplitWriter, StoreWriter

SPEC = StoreSpec(features={}, source={}, transforms={}, boundaries={}, buckets={}, hash_key="")


def write_train(
    writer: StoreWriter, blocks: Iterable[Examples], statistics: dict[str, Any] | None = None
) -> None:
    """Adds the split "train" to a store before it is complete."""
    split = SplitWriter(writer.work / "train")
    for block in blocks:
        split.write(block)
    split.close()
    writer.add("train", split.files, statistics or {})
