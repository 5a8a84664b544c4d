"""The ways a run ends early through no fault of the code."""


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


class StoppedError(RuntimeError):
    """A run that was asked to end by a signal did so, after a checkpoint.

    The command line prints the message and exits with status 128 and the signal's number, as
    programs do that a signal ended.

    Args:
        number: of the signal.
    """

    def __init__(self, text: str, number: int):
        super().__init__(text)
        self.exit_status = 128 + number
