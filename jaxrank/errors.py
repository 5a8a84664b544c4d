"""The two ways a run ends badly through no fault of the code."""


class InputError(ValueError):
    """What the user gave cannot be used: a file, a row, a config field, a flag.

    The message says what must hold, then what was found, then (if not plain) what to do, and
    names file, row, column or field. The command line prints it and exits with status 2.
    """

    exit_status = 2


class RunError(RuntimeError):
    """A run that started well cannot go on, as when the loss is no longer finite.

    The command line prints the message and exits with status 1.
    """

    exit_status = 1
