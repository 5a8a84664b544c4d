"""Runs the units of a preparation as an Apache Beam pipeline, for more than one machine."""

import os
from collections.abc import Callable, Sequence
from typing import Any

from jaxrank import json_files
from jaxrank.data import files
from jaxrank.data.prepare.settings import PrepareSettings
from jaxrank.data.prepare.units import WorkUnit
from jaxrank.data.store.writer import SCRATCH
from jaxrank.errors import InputError, RunError

# Beam's own runner of this name first downloads a program to do the work, and uses the one in the
# package only if that fails.
_NAMES = {"DirectRunner": "apache_beam.runners.portability.fn_api_runner.FnApiRunner"}
_ERRORS = {kind.__name__: kind for kind in (InputError, RunError, OSError)}


class Beam:
    """A pipeline on any of Beam's runners, with one element per unit.

    If several machines work on the units, jaxrank must be installed on all of them. All must reach
    the store, the raw data and the key file by the same names: URLs, or paths on a shared file
    system.

    Args:
        name: "DirectRunner", "DataflowRunner", "FlinkRunner", "SparkRunner", ..., or the full name
            of a class.
        options: of the pipeline, such as "--project=...".

    Raises:
        InputError: Beam is not installed.

    References:
        Akidau et al., The Dataflow Model, VLDB 2015.
    """

    def __init__(self, name: str, options: Sequence[str] = ()):
        try:
            import apache_beam  # noqa: F401, an optional extra
        except ImportError as error:
            raise InputError(
                f"--runner={name}: Apache Beam must be installed: found {error}. Install it with"
                " pip install 'jaxrank[beam]', or leave out --runner."
            ) from error
        self._name, self._options = name, list(options)

    def run(
        self,
        function: Callable[..., None],
        settings: PrepareSettings,
        units: Sequence[WorkUnit],
        *arguments: Any,
    ) -> None:
        """Returns when all units are complete.

        Raises:
            InputError: the runner does not exist, or its options are invalid.
            RunError: the pipeline failed.
        """
        if files.is_local(settings.directory):
            if "dataflow" in self._name.lower():
                raise InputError(
                    f"--runner={self._name}: the output must be a URL, such as gs://bucket/store,"
                    f" that all workers can write to: found {settings.directory}."
                )
            settings = settings._replace(directory=os.path.abspath(settings.directory))
        for path in _failures(settings).values():  # left by an earlier attempt
            path.unlink()
        pipeline = self._pipeline()
        _add_units(pipeline, function, settings, units, arguments)
        failed: Exception | None = None
        try:
            _finish(pipeline)
        except Exception as error:  # each runner has its own exceptions
            failed = error
        if failures := _failures(settings):
            failure = json_files.read(failures[min(failures)])
            raise _ERRORS[failure["kind"]](failure["message"])
        if failed is not None:
            raise RunError(f"--runner={self._name}: the pipeline failed: {failed}") from failed

    def _pipeline(self) -> Any:
        import apache_beam
        from apache_beam.options.pipeline_options import PipelineOptions

        try:
            options = PipelineOptions(self._options)
            options.get_all_options()  # detects invalid values early
            runner = _NAMES.get(self._name, self._name)
            return apache_beam.Pipeline(runner=runner, options=options)
        except (ValueError, TypeError, ImportError, AttributeError, SystemExit) as error:
            # The error of argparse, which has already printed all options.
            why = error.__context__ if isinstance(error, SystemExit) else error
            raise InputError(
                f"--runner={self._name}: must be one of Beam's runners, and --runner-option its"
                f" options: found {' '.join(self._options) or 'no options'}: {why}"
            ) from error


def _add_units(
    pipeline: Any, function: Callable, settings: PrepareSettings, units: Sequence, rest: tuple
) -> None:
    import apache_beam

    # Without a reshuffle a runner would fuse the two steps and one worker would do all units.
    elements = pipeline | apache_beam.Create(units) | apache_beam.Reshuffle()
    _ = elements | "WorkUnit" >> apache_beam.Map(_attempt, function, settings, rest)


def _finish(pipeline: Any) -> None:
    result = pipeline.run()
    try:
        state = result.wait_until_finish()
    except KeyboardInterrupt:
        result.cancel()  # otherwise it would continue to write without this process
        raise
    if state != "DONE":
        raise RunError(f"its last state must be DONE: found {state}")


def _attempt(
    unit: WorkUnit, function: Callable[..., None], settings: PrepareSettings, arguments: tuple
) -> None:
    """Calls function(settings, unit, *arguments) and writes its error to a file for `Beam.run`.

    If it were raised, the runner would retry, and wrap it in other exceptions.
    """
    if any(index < unit.index for index in _failures(settings)):
        return  # only the first error is reported
    try:
        function(settings, unit, *arguments)
    except tuple(_ERRORS.values()) as error:
        kind = next(name for name, kind in _ERRORS.items() if isinstance(error, kind))
        path = files.to_path(settings.directory) / SCRATCH / f"failed-{unit.index:05d}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        failure = {"kind": kind, "message": str(error)}
        files.write_whole(path, json_files.to_text(failure).encode())


def _failures(settings: PrepareSettings) -> dict[int, Any]:
    """Returns the paths of the errors that units have written, by index of the unit."""
    directory = files.to_path(settings.directory) / SCRATCH
    directory.fs.invalidate_cache()  # other processes write there
    paths = directory.glob("failed-*.json")
    return {int(path.stem.removeprefix("failed-")): path for path in paths}
