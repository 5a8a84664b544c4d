"""Errors of a bundle and of a request."""


class BundleError(Exception):
    """A bundle is absent, damaged, incomplete or of another format."""


class RequestError(ValueError):
    """A request has a value that training would have rejected, or lacks a feature.

    Args:
        column: name of the column.
        row: index of the candidate, or None for the context.
        must: requirement on the value.
        value: the actual value as text.
        place: of the value, if it is neither the context nor one candidate.
    """

    def __init__(self, column: str, row: int | None, must: str, value: str, place: str = ""):
        self.column, self.row = column, row
        where = place or ("context" if row is None else f"candidate {row}")
        super().__init__(f"{where}, {column}: must be {must}: found {value}.")
