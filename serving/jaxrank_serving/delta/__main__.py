"""Applies a delta from the command line: `python -m jaxrank_serving.delta BASE DELTA OUTPUT`."""

import argparse
import sys

from jaxrank_serving.delta.apply import apply_delta
from jaxrank_serving.errors import BundleError


def main() -> int:
    """Returns the exit status: 2 for an invalid bundle or delta."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxrank_serving.delta",
        description="Applies a delta of `jaxrank export --since`.",
        allow_abbrev=False,
    )
    parser.add_argument("base", help="the bundle that the delta changes")
    parser.add_argument("delta", help="directory of the delta")
    parser.add_argument("output", help="a directory that does not exist yet")
    args = parser.parse_args()
    try:
        print(apply_delta(args.base, args.delta, args.output))
    except (BundleError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
