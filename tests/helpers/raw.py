"""Raw records of a source, for tests."""

from collections.abc import Iterator

from jaxrank.data.chunk import Chunk
from jaxrank.data.rejects import Rejects


def every_chunk(source, split: str, rejects: Rejects | None = None) -> Iterator[Chunk]:
    """Yields the chunks of all parts of a split, in order."""
    for part in source.parts(split):
        yield from source.chunks(part, rejects or Rejects())
