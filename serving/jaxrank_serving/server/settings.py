"""Flags of the server. Imports the standard library only."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any


class SettingsError(ValueError):
    """A flag has an invalid value."""


def _flag(default: Any, text: str, *, at_least: float = 0, most: float = 2**40) -> Any:
    return dataclasses.field(
        default=default, metadata={"help": text, "at_least": at_least, "most": most}
    )


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of a server.

    bundle: a bundle, a symbolic link to one, or a directory of bundles, see `repository`.
    """

    bundle: Path
    name: str = _flag("", "name of the model in URLs; default: that of the directory")
    host: str = _flag("127.0.0.1", "address to listen on; 0.0.0.0 is reachable from other hosts")
    port: int = _flag(8080, "port to listen on; 0 takes a free one", most=65535)
    threads: int = _flag(
        2, "maximum number of threads that share the candidates of a batch", at_least=1, most=1024
    )
    max_body_bytes: int = _flag(4 << 20, "maximum size of a request's body", at_least=1)
    max_candidates: int = _flag(2000, "maximum number of candidates of a request", at_least=1)
    max_requests: int = _flag(
        128, "maximum number of requests that are read, wait and are scored", at_least=1
    )
    timeout_ms: int = _flag(1000, "maximum time from a request's headers to its scores", at_least=1)
    batch_delay_us: int = _flag(
        1000, "maximum time that the first request of a batch waits for others to be added"
    )
    batch_sizes: tuple[int, ...] = _flag(
        (8, 16, 32, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512),
        "numbers of candidates that the model is run with; a batch is filled up to one of them",
        at_least=1,
        most=2**20,
    )
    reload_seconds: float = _flag(
        5.0, "time between checks for a newer bundle; 0: only POST .../load checks"
    )
    hash_key_file: str = _flag("", "the key, for bundles with keyed hashes")
    skip_verify: bool = _flag(
        False, "start without reading all files; a newer bundle is verified in any case"
    )

    def __post_init__(self) -> None:
        for field in _fields():
            values = getattr(self, field.name)
            low, high = field.metadata["at_least"], field.metadata["most"]
            for value in values if isinstance(values, tuple) else (values,):
                if isinstance(value, int | float) and not low <= value <= high:
                    raise SettingsError(
                        f"{_name(field)}: must be at least {low} and at most {high}: found {value}."
                    )
        if not self.batch_sizes:
            raise SettingsError("--batch-sizes: must have at least one size: found none.")
        object.__setattr__(self, "batch_sizes", tuple(sorted(set(self.batch_sizes))))
        if not self.name:
            object.__setattr__(self, "name", self.bundle.absolute().name)
        if not self.name or "/" in self.name:
            raise SettingsError(f"--name: must be a name without '/': found {self.name!r}.")

    def hash_key(self) -> bytes | None:
        """Returns the key without a final line break, or None if no file is named.

        Raises:
            SettingsError: the file cannot be read.
        """
        if not self.hash_key_file:
            return None
        try:
            key = Path(self.hash_key_file).read_bytes()
        except OSError as error:
            raise SettingsError(f"--hash-key-file: must be readable: found {error}.") from error
        return key.removesuffix(b"\n").removesuffix(b"\r")


def _fields() -> list[dataclasses.Field]:
    return [field for field in dataclasses.fields(Settings) if field.metadata]


def _name(field: dataclasses.Field) -> str:
    return "--" + field.name.replace("_", "-")


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        must = "must be whole numbers with commas between them"
        raise argparse.ArgumentTypeError(f"{must}: found {text!r}") from error


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for each setting, and the argument BUNDLE."""
    parser.add_argument(
        "bundle",
        metavar="BUNDLE",
        help="a bundle, a symbolic link to one, or a directory of bundles, whose last one by name"
        " is served",
    )
    for field in _fields():
        default: Any = field.default
        text = field.metadata["help"]
        if default is False:
            parser.add_argument(_name(field), action="store_true", help=text)
            continue
        shown = default
        kind: Any = type(default)
        if kind is tuple:
            shown, kind = ",".join(map(str, default)), _sizes
        text += "" if default == "" else f"; default: {shown}"
        parser.add_argument(_name(field), type=kind, default=default, help=text, metavar="VALUE")


def from_flags(args: argparse.Namespace) -> Settings:
    """Returns the settings of parsed flags.

    Raises:
        SettingsError: a value is out of range.
    """
    values = {field.name: getattr(args, field.name) for field in _fields()}
    return Settings(Path(args.bundle), **values)
