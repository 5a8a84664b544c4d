"""Input that cannot be used, told as `jaxrank` does."""

import sys
from collections.abc import Callable

from jaxrank.errors import InputError


def run_main(main: Callable[[], None]) -> None:
    """Runs a program; an InputError is its message and status 2."""
    try:
        main()
    except InputError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_status)
