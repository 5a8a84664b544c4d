"""Shared memory that worker processes fill and the process that started them reads."""

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

_WAIT = 0.0005  # seconds between checks for a free piece


class SharedRing:
    """Ring of shared-memory pieces of one size, each filled with the data of one sequence number.

    A returned piece goes to the next number without one, so a piece that is held for long blocks no
    other. Writers wait until their number has a piece. All batches reuse the same memory:
    allocating 8 MB of new shared memory on Linux took 6 ms, writing to existing memory 0.15 ms.

    The ring is pickled to the workers. The memory lasts as long as any process maps it. On Linux it
    is an anonymous file, so nothing is left behind and the size of /dev/shm is no limit.

    Other data for the workers is stored in the same memory. The pipe that starts a process takes 64
    KiB at a time, and a larger write blocks forever if the process dies before it reads.

    Args:
        pieces: number of pieces.
        size: bytes of a piece.
        handed: object that `handed` returns in a worker. None: nothing.
    """

    def __init__(self, pieces: int, size: int, handed: Any = None):
        self._shape = pieces, size
        content = ForkingPickler.dumps(handed)  # multiprocessing uses the same pickler
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
        self._dealt[:-1] = np.arange(pieces) * (pieces + 1)  # Number n starts with piece n

    def __getstate__(self) -> dict[str, Any]:
        return {"_shape": self._shape, "_path": self._path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        with open(self._path, "r+b") as file:
            self._map(file)

    def _front(self) -> int:
        """Returns the bytes in front of the pieces, in whole pages."""
        return -(-8 * (self._shape[0] + 1) // mmap.PAGESIZE) * mmap.PAGESIZE

    def _map(self, file: Any) -> None:
        content = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)
        # Entry k, for the last number n with n mod pieces = k that has a piece, is n * pieces + its
        # piece. At most `pieces` numbers are unread, so no awaited number is overwritten. The last
        # entry is set when the reader has closed the ring.
        self._dealt = content[: 8 * (self._shape[0] + 1)].view(np.int64)
        end = self._front() + self._shape[0] * self._shape[1]
        self._pieces = content[self._front() : end].reshape(self._shape)
        self._handed = content[end:]

    def handed(self) -> Any:
        """Returns a copy of the object that the constructor got."""
        return ForkingPickler.loads(bytes(self._handed))

    def to_fill(self, number: int) -> np.ndarray:
        """Waits for the piece of a number and returns it, u8[size].

        Ends the worker's process if the reader has died, because nothing else would.

        Raises:
            EOFError: the reader has closed the ring.
        """
        parent = multiprocessing.parent_process()
        pieces = self._shape[0]
        while (dealt := int(self._dealt[number % pieces])) // pieces != number:
            if self._dealt[-1]:
                raise EOFError("the process that reads from this worker has ended")
            if parent is not None and not parent.is_alive():
                os._exit(1)
            time.sleep(_WAIT)
        return self._pieces[dealt % pieces]

    def filled(self, number: int) -> tuple[int, np.ndarray]:
        """Returns (index, u8[size]) of the filled piece of a number. Numbers are read in order."""
        pieces = self._shape[0]
        piece = int(self._dealt[number % pieces]) % pieces
        return piece, self._pieces[piece]

    def giver(self) -> Callable[[int], None]:
        """Returns a function that returns a piece to the ring, from any thread and even after
        `close`.
        """
        dealt, pieces = self._dealt, self._shape[0]
        numbers = itertools.count(pieces)

        def give_back(piece: int) -> None:
            number = next(numbers)
            dealt[number % pieces] = number * pieces + piece

        return give_back

    def close(self) -> None:
        """Stops waiting workers and unmaps the reader's memory. For the reader only."""
        self._dealt[-1] = 1
        self._file.close()
        del self._dealt, self._pieces, self._handed
