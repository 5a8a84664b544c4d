"""A worker of a study whose runs take no time; see `jaxrank.studies.execution.worker`."""

import os
import signal
import time
from pathlib import Path

from jaxrank.studies.execution import worker


def fake(run):
    """Fails, crashes or waits as the settings say, and returns the seed of the config."""
    settings = run.settings
    (run.directory / "by").write_text(str(os.getpid()))
    with Path(settings["log"]).open("a") as log:
        log.write(f"{run.directory.name}\n")
    print(f"{run.directory.name} at work")
    if settings.get("error"):
        raise ValueError(settings["error"])
    if settings.get("crash"):
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(settings.get("seconds", 0))
    return {
        "metrics": {"click/auc": float(run.plain_config["seed"])},
        "values": {"pid": os.getpid()},
    }


def devices(run):
    """Describes one device of the platform that the test sets."""
    platform = os.environ.get("FAKE_PLATFORM", "cpu")
    return {"values": {"count": 1, "kind": "a chip", "platform": platform, "cores": 2}}


if __name__ == "__main__":
    worker.serve({"fake": fake, "prepare": lambda run: {}, "devices": devices})
