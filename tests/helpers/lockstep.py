"""Runs several commands in the same processes, which start and connect only once.

    python lockstep.py FILE FOLDER

FILE has a list of [name, change, arguments], in which `{process}` is the index of the process. The
result of a command is written to FOLDER/NAME.PROCESS.json.
"""

import contextlib
import io
import json
import os
import signal
import sys
from pathlib import Path
from unittest import mock

import jaxrank
from jaxrank import cli, native
from jaxrank.data.batches.pipeline import TrainBatches
from jaxrank.errors import InputError, StoppedError
from jaxrank.runtime import processes, rendezvous, stop, threads

_PROGRAMS: dict = {}  # of all commands; see `share_programs`


class _Patch:
    """Replaces attributes until the process ends."""

    setattr = staticmethod(setattr)


@contextlib.contextmanager
def _nothing(process):
    yield


def _version(process):
    """Gives the second process another version."""
    version = "0.0.1" if process else jaxrank.__version__
    return mock.patch.object(jaxrank, "__version__", version)


@contextlib.contextmanager
def _native(process):
    """Disables native code in the first process."""
    native._loaded.cache_clear()
    with mock.patch.dict(os.environ, JAXRANK_NATIVE=str(process)), mock.patch.dict(_PROGRAMS):
        _PROGRAMS.clear()  # they have the native code of earlier commands
        yield
    native._loaded.cache_clear()


def _own_directory(process):
    """Runs each process in its own directory."""
    return contextlib.chdir(str(process))


def _asked(process):
    """Sends the second process a signal to stop after step 10."""
    whole, calls = stop.ShutdownSignal.asked, []

    def asked(self, save=False):
        calls.append(self)
        if process and len(calls) == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return whole(self, save)

    return mock.patch.object(stop.ShutdownSignal, "asked", asked)


def _damaged(process):
    """Damages the data that the second process reads after step 6."""
    whole = TrainBatches.__next__

    def damaged(self):
        if process and self.position == 6:
            raise InputError("block 3 is damaged")
        return whole(self)

    return mock.patch.object(TrainBatches, "__next__", damaged)


CHANGES = dict(
    version=_version, native=_native, apart=_own_directory, asked=_asked, damaged=_damaged
)


def _selftest(folder):
    """Runs checks of the self-test and prints their results, line by line."""
    from jaxrank.selftest import process
    from jaxrank.selftest.job import Size

    small = Size(seconds=0.1, exchange_bytes=4096)
    process.check_machines(Path(folder), small, lambda line: print(json.dumps(line)))


def _run(args):
    _selftest(*args[1:]) if args[0] == "selftest" else cli.run(args)


def main(file, folder):
    threads.ensure_several()  # as the program does
    rendezvous.join()
    process = processes.place()[0]
    rendezvous.join = lambda *_: None
    from sharing import share_programs

    share_programs(_Patch, _PROGRAMS)
    *commands, last = json.loads(Path(file).read_text())
    for name, change, args in commands:
        status, error, out = 0, "", io.StringIO()
        with CHANGES.get(change, _nothing)(process), contextlib.redirect_stdout(out):
            try:
                _run([arg.format(process=process) for arg in args])
            except (InputError, StoppedError) as raised:
                status, error = raised.exit_status, str(raised)
        result = dict(status=status, error=error, out=out.getvalue())
        Path(folder, f"{name}.{process}.json").write_text(json.dumps(result))
    # The program itself runs the last command, and ends the process.
    _, change, sys.argv[1:] = last
    with CHANGES.get(change, _nothing)(process):
        cli.main()


if __name__ == "__main__":
    main(*sys.argv[1:])
