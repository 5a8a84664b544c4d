"""The Open Inference Protocol (KServe v2): a tensor per raw column in, a tensor per output out.

A tensor of a column has the shape [n], or [n, ids] where cells are lists. Shape [1] stands for a
value that all candidates share. https://github.com/kserve/open-inference-protocol
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrank_serving.server import tensors
from jaxrank_serving.server.messages import (
    Response,
    json_response,
    parse_json,
    too_many_candidates,
)
from jaxrank_serving.server.model import Model
from jaxrank_serving.server.score import Features
from jaxrank_serving.server.tensors import Field, Tensor
from jaxrank_serving.signature import Column, Signature

HEADER_LENGTH = b"inference-header-content-length"
_HEADER_NAME = "Inference-Header-Content-Length"
_OUTPUT_TYPE = "FP64"
_NAMES = {"text": "BYTES", "binary": "BYTES", "bool": "BOOL", "int": "INT", "float": "FP"}


class _Output(NamedTuple):
    name: str
    is_binary: bool


class InferCall:
    """A request of /v2/models/NAME/infer.

    Args:
        body: JSON, followed by binary tensors if `header_length` is not None.
        header_length: value of the header with the number of bytes of the JSON part.
    """

    def __init__(self, body: bytes, header_length: str | None):
        self._body, self._header_length = body, header_length
        self._id: str | None = None
        self._outputs: list[_Output] = []

    def features(self, model: Model, most: int) -> Features:
        """Parses the body. Raises HttpError if it is invalid, or of more than `most` candidates."""
        head, rest = self._split()
        tree = parse_json(head)
        request_id = tree.get("id")
        if request_id is not None and not isinstance(request_id, str):
            raise Field("id").error("text", request_id)
        self._id = request_id
        self._outputs = _read_outputs(tree, model.scorer.signature)
        inputs = tree.get("inputs")
        if not isinstance(inputs, list) or not inputs:
            raise Field("inputs").error("a list of tensors", inputs)
        columns: dict[str, Tensor] = {}
        start = 0
        for i, entry in enumerate(inputs):
            tensor, size = _read_input(entry, Field(f"inputs[{i}]"), rest, start)
            if tensor.name in columns:
                raise Field(f"inputs[{i}].name").error("that of one tensor only", tensor.name)
            columns[tensor.name] = tensor
            start += size
        if start != len(rest):
            must = f"{start:,} bytes behind the JSON part, as the inputs declare"
            raise Field("body").error(must, len(rest))
        found = max(tensor.shape[0] for tensor in columns.values())
        if found > most:  # an empty tensor may have any number, and no bytes
            raise too_many_candidates(most, found)
        return _features(columns, model.scorer.signature)

    def _split(self) -> tuple[bytes, bytes]:
        """Returns the JSON part and the binary part of the body."""
        text = self._header_length
        if text is None:
            return self._body, b""
        if not text.isdecimal() or len(text) > 20 or int(text) > len(self._body):
            must = f"a number of bytes of at most {len(self._body):,}, the size of the body"
            raise Field(_HEADER_NAME).error(must, text)
        return self._body[: int(text)], self._body[int(text) :]

    def response(self, model: Model, scores: Mapping[str, np.ndarray]) -> Response:
        """Returns the response with a tensor per output."""
        outputs: list[dict[str, Any]] = []
        binary: list[bytes] = []
        for name, is_binary in self._outputs:
            values = scores[name]
            entry: dict[str, Any] = {"name": name, "shape": [len(values)], "datatype": _OUTPUT_TYPE}
            if is_binary:
                binary.append(values.astype("<f8").tobytes())
                entry["parameters"] = {"binary_data_size": len(binary[-1])}
            else:
                entry["data"] = values.tolist()
            outputs.append(entry)
        tree = {"model_name": model.name, "model_version": model.version, "outputs": outputs}
        if self._id is not None:
            tree["id"] = self._id
        if not binary:
            return json_response(tree)
        head = json.dumps(tree).encode()
        headers = ((HEADER_LENGTH, str(len(head)).encode()),)
        return Response(200, b"".join([head, *binary]), b"application/octet-stream", headers)


def _read_outputs(tree: Mapping[str, Any], signature: Signature) -> list[_Output]:
    """Returns the requested outputs; all if none is named."""
    all_binary = _flag(tree, Field("parameters"), "binary_data_output")
    names = [output.name for output in signature.outputs]
    entries = tree.get("outputs")
    if entries is None:
        return [_Output(name, all_binary) for name in names]
    if not isinstance(entries, list) or not entries:
        raise Field("outputs").error("a list of outputs", entries)
    outputs: list[_Output] = []
    for i, entry in enumerate(entries):
        field = Field(f"outputs[{i}]")
        if not isinstance(entry, dict):
            raise field.error("an object", entry)
        name = entry.get("name")
        if name not in names:
            raise field.inside("name").error(f"one of {', '.join(names)}", name)
        if name in [output.name for output in outputs]:
            raise field.inside("name").error("that of one output only", name)
        is_binary = _flag(entry, field.inside("parameters"), "binary_data", all_binary)
        outputs.append(_Output(name, is_binary))
    return outputs


def _parameters(tree: Mapping[str, Any], field: Field) -> dict[str, Any]:
    parameters = tree.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise field.error("an object", parameters)
    for name in parameters or ():
        if name.startswith("shared_memory") or name == "classification":
            raise field.inside(name).error("absent, because it is not supported", name)
    return parameters or {}


def _flag(tree: Mapping[str, Any], field: Field, name: str, default: bool = False) -> bool:
    value = _parameters(tree, field).get(name, default)
    if not isinstance(value, bool):
        raise field.inside(name).error("true or false", value)
    return value


def _read_input(entry: Any, field: Field, binary: bytes, start: int) -> tuple[Tensor, int]:
    """Returns a tensor, and the number of its bytes in the binary part, which begin at `start`."""
    if not isinstance(entry, dict):
        raise field.error("an object", entry)
    name, datatype = entry.get("name"), entry.get("datatype")
    if not isinstance(name, str) or not name:
        raise field.inside("name").error("the name of a column", name)
    supported = [tensors.BYTES, *tensors.DTYPES]
    if datatype not in supported:
        raise field.inside("datatype").error(f"one of {', '.join(supported)}", datatype)
    parameters = _parameters(entry, field.inside("parameters"))
    size = parameters.get("binary_data_size")
    if size is None:
        shape = tensors.read_shape(entry.get("shape"), field.inside("shape"))
        data = tensors.read_json(entry.get("data"), datatype, shape, field.inside("data"))
        return Tensor(name, shape, data), 0
    size_field = field.inside("parameters").inside("binary_data_size")
    if type(size) is not int or not 0 <= size <= len(binary) - start:
        must = f"a number of bytes, of the {len(binary) - start:,} that are left"
        raise size_field.error(must, size)
    if "data" in entry:
        raise field.inside("data").error("absent, because binary_data_size is set", "data")
    shape = tensors.read_shape(entry.get("shape"), field.inside("shape"))
    part = binary[start : start + size]
    return Tensor(name, shape, tensors.read_binary(part, datatype, shape, size_field)), size


def _features(columns: Mapping[str, Tensor], signature: Signature) -> Features:
    """Divides tensors into the context and the candidates."""
    by_name = {column.name: column for column in signature.columns}
    listed = _list_columns(signature)
    cells = {}
    for name, tensor in columns.items():
        column = by_name.get(name)
        if column is None:
            raise Field("inputs").error(f"columns of the model, {', '.join(by_name)}", name)
        cells[name] = _cells(tensor, column, name in listed)
    count = max(map(len, cells.values()))
    context, candidates = {}, {}
    for name, values in cells.items():
        source = by_name[name].source
        if source == "context" or (source == "any" and len(values) == 1 < count):
            if len(values) != 1:
                must = "of shape [1], because all candidates of a request share it"
                raise Field(name).error(must, list(columns[name].shape))
            context[name] = values[0]
        else:
            candidates[name] = values
    if not candidates:
        raise Field("inputs").error("tensors of candidates too", sorted(context))
    return Features(context, candidates, max(map(len, candidates.values())))


def _cells(tensor: Tensor, column: Column, is_list: bool) -> Sequence[Any]:
    """Returns the cells of a column."""
    count, *inner = tensor.shape
    if not is_list and math.prod(inner) == 1:
        return tensor.values
    if not inner:
        # Texts with separators remain as they are.
        return [_parsed(v, column) for v in tensor.values] if column.is_list else tensor.values
    if len(inner) > 1:
        raise Field(tensor.name).error("of shape [n] or [n, ids]", list(tensor.shape))
    size = inner[0]
    return [tensor.values[i * size : (i + 1) * size] for i in range(count)]


def _parsed(value: Any, column: Column) -> Any:
    """Returns the list that a text holds as JSON, such as '["a", "b"]'."""
    if not isinstance(value, str) or not value:
        return value
    try:
        result = json.loads(value)
    except (ValueError, RecursionError):
        result = None
    if not isinstance(result, list):
        raise Field(column.name).error("a list in JSON, or empty", value)
    return result


def _list_columns(signature: Signature) -> set[str]:
    """Returns the columns whose cells are lists."""
    names = {column.name for column in signature.columns if column.is_list}
    names |= {f.column for f in signature.dense if f.length > 1}
    names |= {f.name for f in signature.categorical if f.length > 1}
    for feature in signature.ragged:
        names |= {feature.name, feature.weights} - {""}
    return names | {sequence.time for sequence in signature.sequences} - {""}


def metadata(model: Model) -> dict[str, Any]:
    """Returns the metadata of a model."""
    signature = model.scorer.signature
    listed = _list_columns(signature)
    return {
        "name": model.name,
        "versions": [model.version],
        "platform": "jaxrank_bundle",
        "inputs": [_input(column, column.name in listed) for column in signature.columns],
        "outputs": [
            {
                "name": output.name,
                "datatype": _OUTPUT_TYPE,
                "shape": [-1],
                "parameters": {"meaning": output.meaning},
            }
            for output in signature.outputs
        ],
    }


def _input(column: Column, is_list: bool) -> dict[str, Any]:
    bits = "".join(filter(str.isdecimal, column.type))
    kind = column.type.removeprefix("u").rstrip("0123456789")
    prefix = "U" if column.type.startswith("uint") else ""
    datatype = prefix + _NAMES.get(kind, "BYTES")
    datatype = datatype + bits if datatype.endswith(("INT", "FP")) else datatype
    shape = [1 if column.source == "context" else -1] + [-1] * (is_list and column.is_list)
    is_required = column.required and not column.now
    parameters = {"source": column.source, "required": is_required}
    return {"name": column.name, "datatype": datatype, "shape": shape, "parameters": parameters}
