"""One day of a chain: prepares it, judges yesterday's model on it, promotes, and trains.

    python examples/daily/day.py --root=/tmp/daily --chain=evicting --day=3

Every command leaves a complete result or none, and is left out if its result is there. So the
script may be killed at any moment and be run again.
"""

import argparse
import contextlib
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from generate import day_name, raw_path

from jaxrank import cli, json_files

CONFIG = Path(__file__).with_name("config.py")
# Fails only where the model is worse beyond chance. README.md says why calibration has this range.
CONDITIONS = ("click/logloss > +0.1%", "click/calibration outside 0.8..1.25")


class Chain:
    """The files of a chain of days.

    Args:
        root: directory of all chains, with the raw data.
        name: of the chain.
        overrides: flags of fields in which the chain differs from the config.
    """

    def __init__(self, root: Path, name: str, overrides: Sequence[str] = ()):
        self.root, self.folder, self.overrides = root, root / name, list(overrides)
        self.production = self.folder / "production"

    def store(self, day: int) -> Path:
        return self.folder / "stores" / day_name(day)

    def run(self, day: int) -> Path:
        return self.folder / "runs" / day_name(day)

    def scores(self, day: int) -> Path:
        """Returns the file with the scores of the day before's model on a day."""
        return self.folder / "scores" / f"{day_name(day)}.json"

    def is_done(self, day: int) -> bool:
        return (self.run(day) / "summary.json").exists()


def jaxrank(*argv: str) -> dict[str, Any]:
    """Runs a command with --json, as `jaxrank ARGV --json` would, and returns its result.

    A gate that fails returns its result too.
    """
    out, log = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(log),
        contextlib.suppress(cli.FailedCheckError),
    ):
        cli.run([*argv, "--json"])
    return json.loads(out.getvalue().splitlines()[-1])


def prepare(chain: Chain, day: int) -> None:
    """Prepares a day with the ids of the day before."""
    before = [f"--vocabularies={chain.store(day - 1)}"] if day else []
    if not (chain.store(day) / "manifest.json").exists():
        jaxrank(
            "prepare",
            f"--config={CONFIG}",
            f"--config.source.files.train={raw_path(chain.root, day)}",
            f"--output={chain.store(day)}",
            *before,
            *chain.overrides,
        )


def gate(chain: Chain, day: int) -> dict[str, Any]:
    """Scores yesterday's model and the one in production on a day that neither has seen.

    If yesterday's model is in production already, it says so and decides nothing.
    """
    path = chain.scores(day)
    if not path.exists():
        if chain.production.resolve() == chain.run(day - 1).resolve():
            print(f"{chain.run(day - 1)} is in production already: nothing to decide")
        result = _gate(chain, day)
        path.parent.mkdir(parents=True, exist_ok=True)
        json_files.write(path, result)
    return json_files.read(path)


def _gate(chain: Chain, day: int) -> dict[str, Any]:
    data = (f"--data={chain.store(day)}", "--split=train")
    conditions = [f"--fail-if={condition}" for condition in CONDITIONS]
    yesterday = chain.run(day - 1)
    if not chain.production.exists() or chain.production.resolve() == yesterday.resolve():
        # Nothing to compare with.
        return jaxrank("evaluate", f"--workdir={yesterday}", *data)
    return jaxrank(
        "evaluate",
        f"--workdir={yesterday}",
        f"--against={chain.production.resolve()}",
        *data,
        *conditions,
    )


def promote(chain: Chain, day: int, verdict: dict[str, Any]) -> None:
    """Lets yesterday's model replace the one in production, unless the gate failed."""
    if verdict.get("gate", {"passed": True})["passed"]:
        link = chain.folder / "production.new"
        link.unlink(missing_ok=True)
        link.symlink_to(chain.run(day - 1).relative_to(chain.folder))
        link.replace(chain.production)


def train(chain: Chain, day: int) -> None:
    """Trains the day's model, which starts from the one in production."""
    before = [f"--init-from={chain.production.resolve()}"] if day else []
    jaxrank(
        "train",
        f"--config={CONFIG}",
        f"--workdir={chain.run(day)}",
        f"--config.data.store={chain.store(day)}",
        "--no-report",
        *before,
        *chain.overrides,
    )


def run_day(chain: Chain, day: int) -> None:
    """Does what is left of a day. The day before must be done."""
    if chain.is_done(day):
        return  # the link is of a later day by now
    prepare(chain, day)
    if day:
        promote(chain, day, gate(chain, day))
    train(chain, day)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--root", type=Path, required=True, help="directory of all files")
    parser.add_argument("--chain", default="evicting", help="name of the chain")
    parser.add_argument("--day", type=int, required=True, help="number of the day, from 0")
    args = parser.parse_args()
    run_day(Chain(args.root, args.chain), args.day)


if __name__ == "__main__":
    main()
