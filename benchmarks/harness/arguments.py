"""Arguments of benchmarks, and the exit status for invalid input."""

import argparse
import sys
from collections.abc import Callable

from jaxrank.errors import InputError


def positive(text: str) -> int:
    """Returns an integer argument that is 1 or more."""
    return at_least(1, text)


def at_least(least: int, text: str) -> int:
    """Returns an integer argument that is `least` or more."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}: {text!r}")
    return int(text)


def run_main(main: Callable[[], None]) -> None:
    """Runs a program. Prints the message of an InputError and exits with status 2."""
    try:
        main()
    except InputError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_status)
