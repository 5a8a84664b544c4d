"""A process that executes the runs of a study, one after the other.

`executor` starts it. It reads the directory of a run from each line of standard input, and answers
with an empty line when `result.json` is in that directory. Output of the run goes to `log.txt`. It
ends at the end of its input, also in the middle of a run: its parent has closed it or is gone.

    python -m jaxrank.studies.execution.worker [FILE of models ...]

With --run=DIRECTORY it executes this run, prints its result and ends.
"""

import argparse
import gc
import os
import queue
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxrank import json_files
from jaxrank.runtime import huge_pages, threads
from jaxrank.studies.execution.kinds import KINDS, Kind, RunInput

# Files of a run.
CONFIG, RUN, COMMAND = "config.json", "run.json", "command.txt"
LOG, RESULT = "log.txt", "result.json"


# Runs after which compiled programs are dropped. Small ones that runs share are worth keeping.
_RUNS_PER_CLEARING = 8


def serve(kinds: Mapping[str, Kind]) -> None:
    """Executes runs until the end of standard input."""
    answers = os.fdopen(os.dup(1), "w")
    for number, path in enumerate(_requests(), 1):
        with (path / LOG).open("wb") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        json_files.write(path / RESULT, execute(path, kinds))
        print(file=answers, flush=True)
        if number % _RUNS_PER_CLEARING == 0 and (jax := sys.modules.get("jax")):
            jax.clear_caches()
        gc.collect()


def _requests() -> Iterator[Path]:
    """Yields the lines of standard input. A thread ends the process at the end of the input."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield Path(lines.get().rstrip("\n"))


def execute(path: Path, kinds: Mapping[str, Kind]) -> dict[str, Any]:
    """Executes the run in a directory and returns its result, see `RunResult`."""
    record = json_files.read(path / RUN)
    for rest in path.iterdir():
        if rest.name not in (CONFIG, RUN, COMMAND, LOG):
            shutil.rmtree(rest) if rest.is_dir() else rest.unlink()
    inputs = record["inputs"]
    run = RunInput(json_files.read(path / CONFIG), record["store"], inputs["settings"], path)
    started = time.monotonic()
    result: dict[str, Any] = {"status": "done"}
    try:
        result |= kinds[inputs["kind"]](run)
    except Exception as error:
        traceback.print_exc()
        result |= {"status": "failed", "error": str(error) or type(error).__name__}
    result.setdefault("seconds", time.monotonic() - started)
    sys.stdout.flush()
    sys.stderr.flush()
    return result


def main() -> None:
    huge_pages.ensure()
    threads.ensure_several()
    from jaxrank import extensions
    from jaxrank.runtime import compilation_cache, processes

    parser = argparse.ArgumentParser(description="Executes runs of a study.", allow_abbrev=False)
    parser.add_argument("--run", type=Path, help="directory of a run to execute")
    parser.add_argument("files", nargs="*", help="files of models")
    args = parser.parse_args()
    for file in args.files:
        extensions.load(file)
    processes.open_devices()
    compilation_cache.enable()
    if args.run is None:
        serve(KINDS)
        return
    result = execute(args.run, KINDS)
    json_files.write(args.run / RESULT, result)
    print(json_files.to_text(result))


if __name__ == "__main__":
    main()
