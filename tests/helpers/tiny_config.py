"""The config of `tiny.py` as a file for the command line."""

import tiny


def get_config():
    return tiny.config()
