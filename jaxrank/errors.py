"""Exceptions for runs that end early without a bug in the code."""


class InputError(ValueError):
    """Invalid input: the value of a flag, a config field, a row or a file.

    The message says what must hold, what was found and, if not obvious, what to do. It names the
    file, row, column or field. The command line prints it and exits with status 2.
    """

    exit_status = 2


class RunError(RuntimeError):
    """A run cannot continue, for example because the loss is no longer finite.

    The command line prints the message and exits with status 1.
    """

    exit_status = 1


class StoppedError(RuntimeError):
    """A signal stopped the run, after a checkpoint was saved.

    The command line prints the message and exits with 128 plus the number of the signal, which is
    the convention for programs that a signal ends.

    Args:
        number: of the signal.
    """

    def __init__(self, text: str, number: int):
        super().__init__(text)
        self.exit_status = 128 + number
