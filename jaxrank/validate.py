"""Settings by pattern: `{"c*": 0.5, "c3": 0.0}` for tables, parameters and whatever has a name."""

import fnmatch
from collections.abc import Mapping, Sequence
from typing import TypeVar

from jaxrank.errors import InputError

Value = TypeVar("Value")


def matched(
    field: str, kind: str, names: Sequence[str], patterns: Mapping[str, Value]
) -> dict[str, Value]:
    """The value of each name that a pattern matches; of several patterns the last one counts.

    Args:
        field: of the config, for the error.
        kind: what the names are of: "table".
        patterns: of the shell's form, with `*`, `?` and `[...]`.

    Raises:
        InputError: a pattern matches no name.
    """
    found: dict[str, Value] = {}
    for pattern, value in patterns.items():
        those = fnmatch.filter(names, pattern)
        if not those:
            raise InputError(
                f"{field}: {pattern!r} must match a {kind}: they are {', '.join(names[:20])}"
                f"{' and more' if len(names) > 20 else ''}."
            )
        found |= dict.fromkeys(those, value)
    return found
