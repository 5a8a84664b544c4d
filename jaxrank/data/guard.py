"""Programs that start processes of this program again."""

import multiprocessing

from jaxrank.errors import InputError

REMEDY = "a program that starts processes must do so under `if __name__ == '__main__':`"


def check(name: str) -> None:
    """Raises if a process that is still being started would start processes.

    It imports its program again, and that would start them again.

    Args:
        name: what the processes are for, such as a config field.

    Raises:
        InputError: says what the program lacks.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise InputError(f"{name}: {REMEDY}, because each of them imports it: found no such guard.")
