"""Invalid configs are rejected by an error that names a field."""

import random
import re

import pytest
import tiny
from fuzzing import CASES
from ml_collections import ConfigDict

from jaxrank import run as jobs
from jaxrank.config import check, default
from jaxrank.config_files import load
from jaxrank.errors import InputError

NONSENSE = ("nan", "inf", "-inf", "abc", "../../etc", "{", "1,2", "1 2", "lambda: 1", "{'a': 1}")
VALUES = (
    *NONSENSE,
    *("-1", "0", "1", "2", "3", "7", "0.5", "-0.5", "1e30", "1e-30"),
    *("1000000007", "1000000000000", "2147483648", "9223372036854775808", "0x10", "1_000"),
    *("", " ", "none", "None", "True", "false", "auto", "/", "*", "a/b", "é", "\0x", "("),
    *("()", "(0,)", "(-1,)", "(16, 'a')", "(1, 2, 3)", "[]", "[1]", "{}", "'x'"),
    *("__import__('os')", "train/2024-01-01"),
)


def leaves(config, prefix=""):
    for name, value in config.items():
        path = f"{prefix}{name}"
        if isinstance(value, ConfigDict) and len(value):
            yield from leaves(value, f"{path}.")
        else:
            yield path


FIELDS = [f for f in leaves(default()) if not f.startswith(("source", "features", "data.store"))]


def overrides(seed):
    draw = random.Random(seed)
    result = []
    for _ in range(draw.choice((1, 1, 2))):
        field = draw.choice(FIELDS)
        if draw.random() < 0.1:
            at = draw.randrange(len(field))
            field = field[:at] + draw.choice(".x[0]_-") + field[at + 1 :]
        result.append(f"--config.{field}={draw.choice(VALUES)}")
    return result


@pytest.mark.parametrize("part", range(2))
def test_a_config_works_or_is_rejected_in_plain_words(store, tmp_path, part):
    config_file = str(tiny.__file__).replace("tiny.py", "tiny_config.py")
    rejected = 0
    for seed in range(part, CASES, 2):
        args = [f"--config.data.store={store}", *overrides(seed)]
        try:
            config = load(config_file, args)
            check(config)
            job = jobs.build(config, tmp_path / str(seed), lambda _: None)
            job.checkpoints.close()
            job.batches.close()
        except InputError as error:
            rejected += 1
            text = str(error)
            assert re.search(r"[a-z_]+", text), args
            assert "Traceback" not in text, args
            assert len(text) < 3000, args
        except Exception as error:
            raise AssertionError(f"{args}: {type(error).__name__}: {error}") from error
        else:
            assert not [a for a in args if a.partition("=")[2] in NONSENSE], args
    assert rejected > CASES / 2 / 2  # most of them are invalid
