"""The directory of each run of a study: WORKDIR/runs/NAME.

    config.json  run.json  command.txt  log.txt  result.json

`result.json` is written last and atomically. A run is a pure function of its config, kind, settings
and devices, of the version of jaxrank and of the code of the user's model. `run.json` has a digest
of these.
"""

import dataclasses
import hashlib
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

import jaxrank
from jaxrank import config_files, json_files, opening, renames
from jaxrank.atomic import replacing
from jaxrank.errors import InputError
from jaxrank.studies.execution.kinds import (
    DEVICES,
    GENERATES_SAMPLE,
    PREPARE,
    VERBS,
    WITHOUT_DATA,
)
from jaxrank.studies.execution.worker import COMMAND, CONFIG, LOG, RESULT, RUN
from jaxrank.studies.study import RunResult, RunSpec, short_name
from jaxrank.workdir import user_code


class Directories:
    """Makes and reads the directories of the runs of a study.

    Args:
        config: the config that runs change.
        workdir: of the study.
        command: arguments that give this config, such as ["--config=quickstart"].
    """

    def __init__(self, config: ConfigDict, workdir: Path, command: Sequence[str]):
        self._base = config_files.to_plain(config)
        self._bases = {"": self._base}  # by `RunSpec.config`
        self._workdir, self._command = workdir, command

    def path(self, spec: RunSpec) -> Path:
        return self._workdir / "runs" / spec.name

    def preparation(self) -> RunSpec:
        """Returns the run that prepares the data that the other runs share."""
        return RunSpec("prepare-data", kind=PREPARE)

    def reads_shared_data(self, spec: RunSpec) -> bool:
        """Returns True if a run reads WORKDIR/data, which the study prepares once."""
        return bool(self._store(spec, self._config(spec)))

    def result(self, spec: RunSpec) -> RunResult | None:
        """Returns the result of a run that has finished, None for one that must be executed.

        A run that failed is executed again, and so is one that describes the devices: the workdir
        may be used on another machine. A run with an invalid config has failed, which is no
        error of the study: a search may draw invalid values.

        Raises:
            InputError: the directory has the result of another run.
        """
        if not re.fullmatch(r"[\w.,=+-]+", spec.name):
            raise ValueError(f"the name of a run must be a file name: found {spec.name!r}.")
        path = self.path(spec)
        try:
            inputs = self._inputs(spec)
        except InputError as error:
            return RunResult(spec, "failed", error=str(error))
        if not (path / RESULT).is_file() or not (path / RUN).is_file():
            return None
        record = json_files.read(path / RUN)
        if record["key"] != _digest(inputs):
            if spec.kind == PREPARE:  # earlier versions named the workdir
                record["inputs"]["settings"].pop("workdir", None)
            old = {"config": _upgraded(json_files.read(path / CONFIG)), **record["inputs"]}
            if _digest(old) != _digest(inputs):
                lines = config_files.differences(old, inputs)
                raise InputError(
                    f"{path}: must hold a run of this study: found the results of another config in"
                    " the workdir, with these differences:\n  "
                    + "\n  ".join(line.removeprefix("config.") for line in lines)
                    + "\nUse another --workdir."
                )
        result = self.read(spec)
        return result if result.is_done and spec.kind != DEVICES else None

    def begin(self, spec: RunSpec) -> None:
        """Prepares the directory of a run that is to be executed."""
        path, inputs = self.path(spec), self._inputs(spec)
        path.mkdir(parents=True, exist_ok=True)
        for name in (RESULT, LOG):
            (path / name).unlink(missing_ok=True)
        config = inputs.pop("config")
        store = self._store(spec, config)
        key = _digest({"config": config, **inputs})
        json_files.write(path / CONFIG, config)
        with replacing(path / COMMAND) as partial:
            partial.write_text(self._command_line(spec, store) + "\n")
        json_files.write(path / RUN, {"key": key, "store": store, "inputs": inputs})

    def read(self, spec: RunSpec) -> RunResult:
        """Reads the result of a run that has finished."""
        names = {field.name for field in dataclasses.fields(RunResult)} - {"spec"}
        record = json_files.read(self.path(spec) / RESULT)
        return RunResult(spec, **{k: v for k, v in record.items() if k in names})

    def _config(self, spec: RunSpec) -> dict[str, Any]:
        if spec.config not in self._bases:
            other = config_files.load(spec.config, command_overrides(self._command))
            self._bases[spec.config] = config_files.to_plain(other)
        config = config_files.from_plain(self._bases[spec.config])
        return config_files.to_plain(config_files.overridden(config, spec.overrides))

    def _inputs(self, spec: RunSpec) -> dict[str, Any]:
        """Returns everything that the result of a run depends on."""
        inputs: dict[str, Any] = {
            "config": self._config(spec),
            "kind": spec.kind,
            "settings": spec.settings,
            "devices": spec.devices,
            "version": jaxrank.__version__,
        }
        if spec.kind not in (PREPARE, DEVICES) and (
            used := user_code.used(config_files.code_names(inputs["config"]))
        ):
            inputs["code"] = {
                kind: {name: entry["checksum"] for name, entry in entries.items()}
                for kind, entries in used.items()
            }
        return json_files.plain(inputs)

    def _store(self, spec: RunSpec, config: Mapping[str, Any]) -> str:
        """Returns the store of the study if a run with this config reads it, or an empty text."""
        fields = config_files.flatten(config)
        is_generated = fields.get("source.kind") == "synthetic"
        if spec.kind in WITHOUT_DATA or (spec.kind in GENERATES_SAMPLE and is_generated):
            return ""
        located = opening.locate(config_files.from_plain(config), self._workdir)
        is_equal = _stored(fields) == _stored(config_files.flatten(self._base))
        return located.path if located.is_own and is_equal else ""

    def _command_line(self, spec: RunSpec, store: str) -> str:
        """Returns a command that does the same as a run.

        Runs that no verb does are executed again by the worker, in their own directory.
        """
        overrides = config_files.override_flags(spec.overrides)
        if store:
            overrides += config_files.override_flags({"data.store": store})
        command = [
            f"--config={spec.config}"
            if spec.config and argument.startswith("--config=")
            else argument
            for argument in self._command
        ]
        line = shlex.join([*command, *overrides])
        devices = f"JAX_NUM_CPU_DEVICES={spec.devices} " if spec.devices else ""
        verb = VERBS.get(spec.kind)
        if verb is None or spec.settings:
            again = f"{devices}python -m jaxrank.studies.execution.worker"
            comment = f"# {spec.kind} {json_files.to_text(spec.settings)}: {line}"
            return f"{comment}\n{again} --run={shlex.quote(str(self.path(spec)))}"
        workdir = shlex.quote(str(self.path(spec) / verb))
        return f"{devices}jaxrank {verb} {line} --workdir={workdir}"


def command_overrides(command: Sequence[str]) -> Sequence[str]:
    """Returns the overrides of a config among the arguments that give it; see `Directories`."""
    names = [argument.partition("=")[0] for argument in command]
    return command[names.index("--config") + 1 :] if "--config" in names else ()


def config_name(command: Sequence[str]) -> str:
    """Returns the name of the config among the arguments that give it, by default "config"."""
    paths = [a.partition("=")[2] for a in command if a.startswith("--config=")]
    return short_name(paths[0]) if paths else "config"


def _stored(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a store is prepared from. A store has the features that runs skip."""
    of_data = ("features.", "source.")
    return {p: v for p, v in fields.items() if p.startswith(of_data) and p != "features.skip"}


def _upgraded(config: Mapping[str, Any]) -> Any:
    """Returns a plain config of an earlier version with the fields that it lacks, by default."""
    return json_files.plain(config_files.to_plain(config_files.from_plain(renames.config(config))))


def _digest(inputs: Mapping[str, Any]) -> str:
    return hashlib.sha256(json_files.to_text(inputs, sort_keys=True).encode()).hexdigest()
