"""Memory that worker processes fill and the process that started them reads."""

import itertools
import mmap
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np

_WAIT = 0.0005  # seconds between looks at whether a piece is free


class SharedRing:
    """Pieces of shared memory of one size, each filled with what was made as some number.

    A piece that is given back is for the next number that has none, so one that is held for long
    keeps only itself. Whoever fills waits until there is a piece for its number. All batches go
    through the same memory: to get 8 MB of new shared memory from Linux took 6 ms, to write to what
    is there 0.15.

    It travels to the workers; the memory lasts as long as anybody maps it, and on Linux it is no
    file that could be left behind or a limit on /dev/shm be too small for.

    What workers need besides goes the same way. Through the pipe that starts a process go 64 KiB at
    a time, and who writes more waits for good for one that dies before it reads.

    Args:
        pieces: of them.
        size: bytes of a piece.
        handed: what `handed` gives a worker; None: nothing.
    """

    def __init__(self, pieces: int, size: int, handed: Any = None):
        self._shape = pieces, size
        content = ForkingPickler.dumps(handed)  # as multiprocessing hands things over
        if hasattr(os, "memfd_create"):
            self._file: Any = os.fdopen(os.memfd_create("jaxrank"), "r+b")
            self._path = f"/proc/{os.getpid()}/fd/{self._file.fileno()}"
        else:
            self._file = tempfile.NamedTemporaryFile()  # noqa: SIM115 - closed by `close`
            self._path = self._file.name
        self._file.truncate(self._front() + pieces * size)
        self._file.seek(0, os.SEEK_END)
        self._file.write(content)
        self._file.flush()
        self._map(self._file)
        self._dealt[:-1] = np.arange(pieces) * (pieces + 1)  # to each number the piece of its name

    def __getstate__(self) -> dict[str, Any]:
        return {"_shape": self._shape, "_path": self._path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        with open(self._path, "r+b") as file:
            self._map(file)

    def _front(self) -> int:
        """Bytes in front of the pieces, whole pages."""
        return -(-8 * (self._shape[0] + 1) // mmap.PAGESIZE) * mmap.PAGESIZE

    def _map(self, file: Any) -> None:
        content = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)
        # Of the last number n that is k mod pieces and has a piece: n * pieces + its piece. No more
        # numbers than there are pieces are not read yet, so none that is waited for is lost.
        # Behind them, whether nobody reads any more.
        self._dealt = content[: 8 * (self._shape[0] + 1)].view(np.int64)
        behind = self._front() + self._shape[0] * self._shape[1]
        self._pieces = content[self._front() : behind].reshape(self._shape)
        self._handed = content[behind:]

    def handed(self) -> Any:
        """What was handed over, made anew."""
        return ForkingPickler.loads(bytes(self._handed))

    def to_fill(self, number: int) -> np.ndarray:
        """u8[size], the piece of a number, as soon as there is one.

        Ends the worker's process where the one that reads is gone, for nobody else would.

        Raises:
            EOFError: the reader closed it.
        """
        parent = multiprocessing.parent_process()
        pieces = self._shape[0]
        while (dealt := int(self._dealt[number % pieces])) // pieces != number:
            if self._dealt[-1]:
                raise EOFError("nobody reads what this worker makes")
            if parent is not None and not parent.is_alive():
                os._exit(1)
            time.sleep(_WAIT)
        return self._pieces[dealt % pieces]

    def filled(self, number: int) -> tuple[int, np.ndarray]:
        """(which it is, u8[size]): the piece of a number that was filled; each is read in turn."""
        pieces = self._shape[0]
        piece = int(self._dealt[number % pieces]) % pieces
        return piece, self._pieces[piece]

    def giver(self) -> Callable[[int], None]:
        """A function that gives a piece back, from any thread; of use after `close` too."""
        dealt, pieces = self._dealt, self._shape[0]
        numbers = itertools.count(pieces)

        def give_back(piece: int) -> None:
            number = next(numbers)
            dealt[number % pieces] = number * pieces + piece

        return give_back

    def close(self) -> None:
        """For the reader: ends the workers' waiting, and its own share in the memory."""
        self._dealt[-1] = 1
        self._file.close()
        del self._dealt, self._pieces, self._handed
