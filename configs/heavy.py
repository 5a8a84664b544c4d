"""A larger model: 1.5 times the features of `standard`, with larger vectors and layers.

jaxrank train --config=configs/heavy.py:small --workdir=/tmp/heavy

1,500 features including 300 lists, vectors and layers twice as wide, and five cross layers instead
of three: 1.2 G parameters. See configs/standard.py.
"""

from standard import ranker


def get_config(size: str = ""):
    """`size`: "small", or "" for the whole model."""
    return ranker(size, features=1.5, dims=(16, 32), width=2, cross_layers=5)
