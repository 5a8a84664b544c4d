"""Arguments of benchmarks that count something."""

import argparse


def positive(text: str) -> int:
    """A whole number, 1 or more."""
    return at_least(1, text)


def rounds_of_guard(text: str) -> int:
    """A whole number, 6 or more: the median of fewer has no interval of 95%."""
    return at_least(6, text)


def at_least(least: int, text: str) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}: {text!r}")
    return int(text)
