"""Rejects files whose names say that they are copies of others, or not complete.

Read with the others, they would silently count rows twice.
"""

import glob
import os
import re
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

from jaxrank.errors import InputError

# Ends of the names of backups and of files that a program is still writing.
_NOT_FINISHED = (
    *("~", ".bak", ".bkp", ".backup", ".old", ".orig", ".save", ".swp", ".tmp", ".temp"),
    *(".part", ".partial", ".filepart", ".crdownload", ".download", ".incomplete"),
    *(".inprogress", "._copying_"),
)
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zstd", ".lz4", ".br")
_FOLDERS_OF_COPIES = ("backup", "backups", "bak", "copy", "old")

# Names that programs give to copies: "part (1).csv", "Copy of part.csv", "part - Copy (2).csv",
# "part copy 2.csv", "part_copy.csv", "part (another copy).csv", "part (conflicted copy).csv" and
# "part.backup.csv".
_WORD_OF_COPY = r"(?:copy|kopie|copie|copia|c\u00f3pia|backup|bak)"
_NAMED_BEFORE = re.compile(
    rf"{_WORD_OF_COPY} (?:\(\d+\) )?(?:of|von|de|di) (?P<name>.+)", re.IGNORECASE
)
_NAMED_AFTER = re.compile(
    rf"(?P<name>.+?)(?: ?\(\d{{1,3}}\)| ?\([^()]*\b{_WORD_OF_COPY}\b[^()]*\)"
    rf"| ?[-_. ] ?{_WORD_OF_COPY}(?:[-_ ]?\(?\d+\)?)?)(?P<end>(?:\.\w+)*)",
    re.IGNORECASE,
)


def check_finished(path: str) -> None:
    """Rejects a file of a directory that is a backup or incomplete by its name."""
    if _end(path):
        raise InputError(
            f"{path}: must not be a backup or unfinished file of the directory: found this name."
            " Remove the file, or select the others by a pattern."
        )


def check_matches(pattern: str, paths: Sequence[str]) -> None:
    """Rejects matches of a pattern that are backups or incomplete, unless the pattern says so.

    So are files in a directory such as Spark's _temporary, which directories leave out.
    """
    parts = re.split(r"[/\\]", pattern)
    literal = next(i for i, part in enumerate(parts) if glob.has_magic(part))
    named = [part for part in parts[literal:] if part.startswith("_")]
    for path in paths:
        end = _end(path)
        if end and end not in parts[-1].lower():
            raise InputError(
                f"{path}: must not be a backup or unfinished file, as its name says: found it by"
                f" the pattern {pattern!r}. Remove the file, or end the pattern with what the names"
                " of the others end with."
            )
        folders = re.split(r"[/\\]", path)[literal:-1]
        for folder in folders:
            if folder.startswith("_") and not any(fnmatchcase(folder, part) for part in named):
                raise InputError(
                    f"{path}: must not be in a directory whose name begins with '_', such as one of"
                    f" unfinished or removed files: found it by the pattern {pattern!r}. Name"
                    f" the directory above {folder!r} without a pattern to leave it out, or write"
                    " its name in the pattern to read it."
                )


def check_beside(paths: Sequence[str], named: Collection[str]) -> None:
    """Rejects files with a file beside them that has the same rows by its name.

    Args:
        named: the paths that the config names without a directory or a pattern. It may name both.
    """
    plain: dict[str, str] = {}
    for path in sorted(paths, key=_is_compressed):
        plain.setdefault(_uncompressed(path), path)

    def check(path: str, other: str | None, kind: str) -> None:
        if other is None or os.path.normpath(other) == os.path.normpath(path):
            return
        if path in named and other in named:
            return
        shown = os.path.relpath(other, os.path.dirname(path))
        raise InputError(
            f"{path}: must not lie beside {shown}, whose {kind} it is by its name: found both, and"
            " both would be read. Remove or rename one, or list the files to read in source.files."
        )

    for path in paths:
        whole = _uncompressed(path)
        check(path, plain[whole], "compressed copy")
        folder, name = os.path.split(whole)
        if original := _original(name):
            check(path, plain.get(os.path.join(folder, original)), "copy")
        above, folder_name = os.path.split(folder)
        if folder_name.lower() in _FOLDERS_OF_COPIES:
            check(path, plain.get(os.path.join(above, name)), "copy")


def _end(path: str) -> str:
    name = os.path.basename(path).lower()
    if len(name) > 1 and name[0] == name[-1] == "#":  # of Emacs
        return "#"
    return next((end for end in _NOT_FINISHED if name.endswith(end)), "")


def _is_compressed(path: str) -> bool:
    return path.lower().endswith(_COMPRESSED)


def _uncompressed(path: str) -> str:
    return os.path.splitext(path)[0] if _is_compressed(path) else path


def _original(name: str) -> str:
    """Returns the name of the file that a copy was made of, "" if the name is not of a copy."""
    if match := _NAMED_BEFORE.fullmatch(name):
        return match["name"]
    match = _NAMED_AFTER.fullmatch(name)
    return match["name"] + match["end"] if match else ""
