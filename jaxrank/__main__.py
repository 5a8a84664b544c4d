"""The console program `jaxrank`, and `python -m jaxrank`."""

import os
import signal
from types import FrameType
from typing import NoReturn


def _end(number: int, _: FrameType | None) -> NoReturn:
    os.write(2, b"jaxrank: interrupted\n")
    os._exit(128 + number)


def main() -> NoReturn:
    """Runs `cli.main`. A Ctrl-C during its imports ends the program without a traceback."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    from jaxrank import cli

    signal.signal(signal.SIGINT, before)
    cli.main()


if __name__ == "__main__":
    main()
