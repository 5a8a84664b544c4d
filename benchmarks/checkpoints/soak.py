"""Soak test: kills a long run at random times and resumes it with other devices and processes.

    python -m benchmarks.checkpoints.soak --workdir=/tmp/soak --minutes=30

Trains undisturbed on one device and then on two. Then trains the same steps with 1, 2, 4 or 8
devices in 1 or 2 processes, and stops each start with kill -9 or SIGTERM after a random time, until
all steps are done. `--minutes` is the approximate time of this part on two cores.

Prints every stop, and the differences between the final results. Batches are the same, but other
devices add up in another order, and training amplifies such differences. The undisturbed run on two
devices shows the size of this effect alone.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from ml_collections import ConfigDict

from benchmarks.harness.arguments import run_main
from benchmarks.harness.checkout import ROOT, environment
from benchmarks.quality.seeds import jaxrank, prepare_once
from jaxrank.config import default

CONFIG = str(Path(__file__).resolve())
DEVICES = ((1, 1), (2, 1), (4, 1), (8, 1), (4, 2), (8, 2))  # devices, processes


def get_config() -> ConfigDict:
    c = default()
    rows = dict(train=2_000_000, valid=50_000)
    lists = [dict(rows=20_000, mean_length=8)]
    ids = [100_000, 10_000, 1000, 100, 10]
    c.source = ConfigDict(
        dict(
            kind="synthetic",
            rows=rows,
            seed=9,
            dense=4,
            categorical=ids,
            ragged=lists,
            exponent=1.05,
        )
    )
    c.features.tasks = [dict(name="click", label="click", truth="p_click")]
    c.features.dense = [dict(columns="f*", standardize=True)]
    c.features.categorical = [
        dict(columns=f"c{i}", encoding="integer", rows=count) for i, count in enumerate(ids)
    ]
    c.features.ragged = [dict(columns="l0", encoding="integer", rows=20_000)]
    c.embedding.dim = 8
    c.model.mlp_units = (32, 16)
    c.batch_size = 2048
    c.num_steps = 16
    c.eval.every_steps = 512
    c.checkpoint.every_steps = 64
    c.ema_decay = 0.999
    return c


def command(folder: Path, name: str, steps: int, devices: int, processes: int) -> list[str]:
    flags = [
        f"--config={CONFIG}",
        f"--workdir={folder / name}",
        f"--config.data.store={folder / 'data'}",
    ]
    flags += [f"--config.num_steps={steps}", "--allow-config-change", "--quiet"]
    if processes == 1:
        return [sys.executable, "-m", "jaxrank", "train", *flags]
    script = str(ROOT / "launch" / "local.sh")
    each = f"--devices={devices // processes}"
    return [script, str(processes), each, "--restarts=0", "--", "train", *flags]


def started(args: list[str], devices: int) -> subprocess.Popen[str]:
    env = environment() | {"PYTHON": sys.executable, "JAX_NUM_CPU_DEVICES": str(devices)}
    return subprocess.Popen(
        args,
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def children(session: int) -> list[int]:
    """Returns the processes that train, among all that a launcher has started."""
    processes = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != session:
            try:
                in_session = os.getsid(int(entry.name)) == session
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if in_session and b"jaxrank" in words and b"env" not in words:
                processes.append(int(entry.name))
    return processes or [session]


def newest(workdir: Path) -> int:
    steps = [int(p.name) for p in workdir.glob("checkpoints/*") if p.name.isdecimal()]
    return max(steps, default=0)


class End(NamedTuple):
    """Result of a run: metrics of the validation split, and the loss of each step."""

    logloss: float
    auc: float
    losses: list[float]

    def __str__(self) -> str:
        return f"validation logloss {self.logloss:.6f}, AUC {self.auc:.6f}"


def end(workdir: Path, steps: int) -> End:
    metrics = jaxrank("evaluate", f"--workdir={workdir}")["metrics"]
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    losses = {r["step"]: r["loss"] for r in lines if r["kind"] == "train"}
    assert list(losses) == list(range(1, steps + 1))
    return End(metrics["click/logloss"], metrics["click/auc"], list(losses.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workdir", required=True)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    folder, draw = Path(args.workdir), random.Random(args.seed)
    prepare_once(CONFIG, folder / "data")

    # Startup, and devices that share cores, make the disturbed run about eight times as long as its
    # steps alone. The number of steps is a multiple of the interval of evaluations.
    probe = [f"--config={CONFIG}", f"--config.data.store={folder / 'data'}"]
    probe += ["--config.num_steps=512", "--quiet"]
    told_steps = folder / "steps"  # written by an earlier call that was interrupted
    if not told_steps.exists():
        shutil.rmtree(folder / "probe", ignore_errors=True)
        rate = jaxrank("train", *probe, f"--workdir={folder / 'probe'}")["examples_per_second"]
        told_steps.write_text(str(max(1, int(args.minutes * 60 / 8 * rate / 2048 / 512)) * 512))
    steps = int(told_steps.read_text())
    for name, devices in (("one", 1), ("two", 2)):
        run = started(command(folder, name, steps, devices, 1), devices)
        _, errors = run.communicate()
        if run.returncode:
            raise SystemExit(errors)
        print(f"{steps:,} steps undisturbed on {devices} devices", flush=True)

    endings, start = 0, time.monotonic()
    while newest(folder / "disturbed") < steps:
        devices, processes = draw.choice(DEVICES)
        before = newest(folder / "disturbed")
        process = started(command(folder, "disturbed", steps, devices, processes), devices)
        number = draw.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM))
        try:
            process.wait(timeout=draw.uniform(10, 40))
        except subprocess.TimeoutExpired:
            # The launcher forwards SIGTERM. After kill -9 of one process it ends the others.
            killed = number == signal.SIGKILL and processes > 1
            os.kill(draw.choice(children(process.pid)) if killed else process.pid, number)
        _, errors = process.communicate()
        if process.returncode not in (0, -9, 1, 134, 137, 143):
            raise SystemExit(f"status {process.returncode}: {errors}")
        endings += process.returncode != 0
        print(
            f"{devices} devices, {processes} processes: from step {before} to"
            f" {newest(folder / 'disturbed')}, status {process.returncode}",
            flush=True,
        )
    print(f"{endings} endings in {time.monotonic() - start:.0f} s")
    first = end(folder / "one", steps)
    print(f"undisturbed on one device: {first}")
    for name in ("disturbed", "two"):
        last = end(folder / name, steps)
        differences = [abs(a - b) for a, b in zip(first.losses, last.losses, strict=True)]
        print(
            f"{name}: {last}; difference of a step's loss from one device: at most"
            f" {max(differences):.2e}, mean {sum(differences) / steps:.2e}"
        )


if __name__ == "__main__":
    run_main(main)
