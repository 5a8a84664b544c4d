"""The calibration of a checkpoint: WORKDIR/calibration/STEP.json."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrank import json_files
from jaxrank.calibration.maps import Calibration
from jaxrank.errors import InputError

_AGAIN = " Run `jaxrank calibrate` again, or with --method=none to remove the file."
_SEAL = json_files.Seal("digest", of_bytes=False, hint=_AGAIN)


def calibration_path(workdir: Path, step: int) -> Path:
    return workdir / "calibration" / f"{step}.json"


def save(
    workdir: Path,
    step: int,
    calibration: Calibration,
    tasks: Sequence[str],
    checksums: Mapping[str, int],
) -> Path:
    """Writes the calibration of a checkpoint and returns its path.

    Args:
        tasks: names of all tasks.
        checksums: of the arrays of the weights that the calibration is for.
    """
    path = calibration_path(workdir, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "step": step,
        "weights": _digest(checksums),
        **calibration.to_state(tasks),
    }
    json_files.write(path, _SEAL.add(content))
    return path


def load(workdir: Path, step: int, checksums: Mapping[str, int]) -> Calibration | None:
    """Reads the calibration of a checkpoint, None if it has none.

    Args:
        checksums: see `save`.

    Raises:
        InputError: the file is damaged, or is of other weights.
    """
    path = calibration_path(workdir, step)
    if not path.is_file():
        return None
    content: Any = _SEAL.read(path)
    if content["weights"] != _digest(checksums):
        raise InputError(
            f"{path}: must be of the weights of checkpoint {step}: found the calibration of others,"
            f" which had this step before.{_AGAIN}"
        )
    return Calibration.from_state(content)


def _digest(checksums: Mapping[str, int]) -> str:
    """Returns a checksum of the checksums of arrays."""
    return str(_SEAL.add(dict(checksums))["digest"])
