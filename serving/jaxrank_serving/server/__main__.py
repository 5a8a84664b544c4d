"""Starts the server without jaxrank: `python -m jaxrank_serving.server BUNDLE`."""

import argparse
import signal
import sys

from jaxrank_serving.errors import BundleError
from jaxrank_serving.server import settings
from jaxrank_serving.server.serve import serve


def main() -> int:
    """Returns the exit status: 0 after SIGTERM or Ctrl-C, 2 for invalid input."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxrank_serving.server",
        description="serve a bundle over HTTP",
        allow_abbrev=False,
    )
    settings.add_flags(parser)
    # Before the server handles it. Process 1 of a container gets no signal without a handler.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        serve(settings.from_flags(parser.parse_args()))
    except (BundleError, settings.SettingsError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
