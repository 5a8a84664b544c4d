"""Parses tf.Example messages without TensorFlow, and infers column types."""

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory

from jaxrank.errors import InputError

_KINDS = {"bytes": "bytes_list", "float32": "float_list", "int64": "int64_list"}
TAGS = {kind: number << 3 | 2 for number, kind in enumerate(_KINDS, start=1)}
COLUMN_TYPES = (*_KINDS, *(f"list<{kind}>" for kind in _KINDS))

DecodeError = message.DecodeError


class ColumnType(NamedTuple):
    """The type of a column: one value of a feature, or a list of them.

    kind: "bytes", "float32" or "int64".
    """

    kind: str
    is_list: bool

    @classmethod
    def parse(cls, text: str) -> "ColumnType":
        """Parses one of COLUMN_TYPES."""
        inner = re.fullmatch(r"list<(\w+)>", text)
        return cls(inner[1] if inner else text, bool(inner))

    def __str__(self) -> str:
        return f"list<{self.kind}>" if self.is_list else self.kind


def _messages() -> tuple[Any, Any]:
    """Returns the classes Example and Feature of tensorflow/core/example/example.proto.

    Two types differ from it without changing the bytes. A feature within an Example stays bytes,
    because only requested columns are decoded. The map of features is a list of entries, as it is
    encoded, so names need not be UTF-8.
    """
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="jaxrank/example.proto", package="jaxrank", syntax="proto3"
    )

    def add(
        owner: Any,
        name: str,
        number: int,
        kind: Any,
        *,
        is_repeated: bool = False,
        type_name: str = "",
    ) -> Any:
        label = field.LABEL_REPEATED if is_repeated else field.LABEL_OPTIONAL
        added = owner.add(name=name, number=number, type=kind, label=label)
        if type_name:
            added.type_name = f".jaxrank.{type_name}"
        return added

    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    types = (field.TYPE_BYTES, field.TYPE_FLOAT, field.TYPE_INT64)
    for number, (name, kind) in enumerate(zip(_KINDS.values(), types, strict=True), start=1):
        values = file.message_type.add(name=name)
        add(values.field, "value", 1, kind, is_repeated=True)
        feature_field = add(feature.field, name, number, field.TYPE_MESSAGE, type_name=name)
        feature_field.oneof_index = 0
    features = file.message_type.add(name="Features")
    entry = file.message_type.add(name="Entry")
    add(entry.field, "key", 1, field.TYPE_BYTES)
    add(entry.field, "value", 2, field.TYPE_BYTES)
    add(features.field, "feature", 1, field.TYPE_MESSAGE, is_repeated=True, type_name="Entry")
    example = file.message_type.add(name="Example")
    add(example.field, "features", 1, field.TYPE_MESSAGE, type_name="Features")
    # A separate pool, because TensorFlow may be loaded too.
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    names = ("jaxrank.Example", "jaxrank.Feature")
    classes = [message_factory.GetMessageClass(pool.FindMessageTypeByName(n)) for n in names]
    return classes[0], classes[1]


_Example, _Feature = _messages()


def parse_features(record: bytes) -> dict[bytes, bytes]:
    """Returns the encoded features of a record by name. The last one of equal names is used.

    Raises:
        DecodeError: the record is not a tf.Example.
    """
    return {e.key: e.value for e in _Example.FromString(record).features.feature}


def parse_values(feature: bytes) -> tuple[str, list[Any]]:
    """Returns the kind of a feature, or "" if it has none, and its values.

    Raises:
        DecodeError: the bytes are not a feature.
    """
    message = _Feature.FromString(feature)
    name = message.WhichOneof("kind")
    if name is None:
        return "", []
    kind = next(kind for kind, field in _KINDS.items() if field == name)
    return kind, list(getattr(message, name).value)


def plain(kind: str, values: list[Any]) -> bytes:
    """Encodes a feature in the default form: its list once, and numbers packed."""
    message = _Feature()
    getattr(message, _KINDS[kind]).value.extend(values)
    return message.SerializeToString()


def shown(record: bytes) -> dict[str, list[Any]] | str:
    """Returns a record's values by feature for messages, or hexadecimal if it is invalid."""
    try:
        features = parse_features(record).items()
        return {name.decode(errors="replace"): parse_values(value)[1] for name, value in features}
    except DecodeError:
        return record.hex()


def infer(records: Iterable[bytes], path: str) -> dict[str, ColumnType]:
    """Infers the types of all features, by name: a list if any record has two values.

    Unreadable records are skipped.

    Raises:
        InputError: a feature has two kinds, or there are no features.
    """
    types: dict[str, ColumnType] = {}
    empty: dict[str, ColumnType] = {}
    for record in records:
        try:
            features = {k.decode(): parse_values(v) for k, v in parse_features(record).items()}
        except (DecodeError, UnicodeDecodeError):
            continue
        for name, (kind, values) in features.items():
            if kind and not values:
                empty[name] = ColumnType(kind, False)
            if not values:
                continue
            earlier = types.setdefault(name, ColumnType(kind, False))
            if earlier.kind != kind:
                raise InputError(
                    f"{path}, column {name}: must be of one kind in all records: found"
                    f" {earlier.kind} and {kind}. Set source.columns to the correct kind."
                )
            if len(values) > 1:
                types[name] = ColumnType(kind, True)
    types = empty | types
    if not types:
        raise InputError(
            f"{path}: must begin with records of tf.Example that have features, or source.columns"
            " must name them: found none."
        )
    return dict(sorted(types.items()))
