"""An ONNX graph under construction: nodes, constants, and shapes with one symbolic dimension."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import onnx
from onnx import helper, numpy_helper

_OPSET = 18
_IR_VERSION = 10  # that of opset 18 with bfloat16, which ONNX Runtime has read since 1.18


class Tensor(NamedTuple):
    """An input of a model. The first dimension of the shape is symbolic.

    shape: of one example, without the first dimension.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype


class Graph:
    """Collects nodes and constants. Tensors are named by texts.

    Args:
        inputs: of the model.
        batch: the symbolic dimension in shapes of JAX.
    """

    def __init__(self, inputs: Sequence[Tensor], batch: Any):
        self._inputs, self._batch = list(inputs), batch
        self._nodes: list[onnx.NodeProto] = []
        self._constants: dict[str, np.ndarray] = {}
        self._names: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._outputs: list[onnx.ValueInfoProto] = []
        self._count = 0
        self.origin = ""  # of the nodes that are added next, for messages about them
        # Tensors made by broadcasting, which elementwise operations of ONNX do themselves.
        self.compact: dict[str, str] = {}
        shape = self.add("Shape", inputs[0].name)
        self._examples = self.add("Slice", shape, self.constant([0]), self.constant([1]))

    def add(self, kind: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Any:
        """Adds a node and returns the name of its output, or a list of several names."""
        names = [f"v{self._count + i}" for i in range(outputs)]
        self._count += outputs
        unique = f"{self.origin} {names[0]}"
        self._nodes.append(helper.make_node(kind, list(inputs), names, name=unique, **attributes))
        return names[0] if outputs == 1 else names

    def constant(self, value: Any, dtype: Any = None) -> str:
        """Returns the name of a constant. Equal ones are stored once. Integers are int64."""
        array = np.asarray(value, dtype)
        key = array.dtype.str + array.dtype.name, array.shape, array.tobytes()
        if key not in self._names:
            name = f"c{len(self._names)}"
            self._names[key], self._constants[name] = name, array
        return self._names[key]

    def value(self, name: str) -> np.ndarray | None:
        """Returns the value of a constant, or None for another tensor."""
        return self._constants.get(name)

    def reshape(self, name: str, shape: Sequence[Any]) -> str:
        """Reshapes a tensor. At most one dimension is symbolic."""
        sizes = [d if isinstance(d, int) else -1 for d in shape]
        if sizes.count(-1) > 1:
            raise NotImplementedError(f"a shape with several symbolic dimensions, {tuple(shape)}")
        if 0 not in sizes:
            return self.add("Reshape", name, self.constant(sizes, np.int64))
        # A dimension of 0 is a size, and not that of the input.
        return self.add("Reshape", name, self.sizes(shape), allowzero=1)

    def sizes(self, shape: Sequence[Any]) -> str:
        """Returns a tensor int64[rank] with the sizes of a shape."""
        if all(isinstance(d, int) for d in shape):
            return self.constant(list(shape), np.int64)
        parts = [self.constant([d]) if isinstance(d, int) else self._size(d) for d in shape]
        return parts[0] if len(parts) == 1 else self.add("Concat", *parts, axis=0)

    def _size(self, dimension: Any) -> str:
        """Returns a tensor int64[1] with the size of a symbolic dimension."""
        if dimension == self._batch:
            return self._examples
        factor = dimension // self._batch
        if not isinstance(factor, int) or dimension != factor * self._batch:
            raise NotImplementedError(f"a dimension {dimension}, no multiple of {self._batch}")
        return self.add("Mul", self._examples, self.constant([factor]))

    def broadcast(self, name: str, shape: Sequence[Any]) -> str:
        """Broadcasts a tensor of the same rank."""
        expanded = self.add("Expand", name, self.sizes(shape))
        self.compact[expanded] = name
        return expanded

    def output(self, name: str, tensor: str, columns: int, dtype: np.dtype) -> None:
        """Declares a tensor f[batch, columns] as an output of the model."""
        self._nodes.append(helper.make_node("Identity", [tensor], [name]))
        self._outputs.append(_declared(Tensor(name, (columns,), dtype)))

    def model(self, producer: str) -> onnx.ModelProto:
        """Returns the model without nodes that nothing reads. Nodes are named by their origin."""
        read = {output.name for output in self._outputs}
        nodes = []
        for node in reversed(self._nodes):
            if read.intersection(node.output):
                read.update(node.input)
                nodes.append(node)
        constants = [
            numpy_helper.from_array(array, name)
            for name, array in self._constants.items()
            if name in read
        ]
        graph = helper.make_graph(
            nodes[::-1],
            "dense_part",
            [_declared(i) for i in self._inputs],
            self._outputs,
            constants,
        )
        return helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", _OPSET)],
            ir_version=_IR_VERSION,
            producer_name=producer,
        )


Converter: TypeAlias = Callable[[Graph, Any, list[str]], list[str]]


def element_type(dtype: Any) -> int:
    """Returns ONNX's number of a dtype."""
    return helper.np_dtype_to_tensor_dtype(np.dtype(dtype))


def _declared(tensor: Tensor) -> onnx.ValueInfoProto:
    shape: list[str | int | None] = ["batch", *tensor.shape]
    return helper.make_tensor_value_info(tensor.name, element_type(tensor.dtype), shape)
