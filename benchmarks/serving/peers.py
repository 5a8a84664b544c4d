"""Other ways to run the model of a bundle: torch.compile, and an ONNX graph that has the tables."""

import contextlib
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from jaxrank_serving import Scorer
from jaxrank_serving.encoder import Features
from onnx import helper, numpy_helper

_PEER = Path(__file__).with_name("torch_peer.py")
_MAX_DIFFERENCE = 1e-4


def with_tables(scorer: Scorer, features: Features) -> Callable[[], Any]:
    """Returns a function that scores a request by a graph that gathers its vectors itself.

    Only models without lists and sequences have such a graph here.
    """
    signature = scorer.signature
    model = onnx.load(scorer.bundle.path / signature.model.onnx)
    feed = {"dense": features.dense}
    for stack in signature.stacks:
        rows = np.empty((len(features.dense), len(stack.ids)), np.int64)
        for place, (name, i) in enumerate(stack.ids):
            rows[:, place] = features.ids[name][:, i]  # a single row of the context is repeated
        feed[f"{stack.name}_rows"] = rows
        table = np.fromfile(scorer.bundle.file(stack.file), "<f4").reshape(-1, stack.dim)
        model.graph.initializer.append(numpy_helper.from_array(table, f"{stack.name}_table"))
        inputs = [f"{stack.name}_table", f"{stack.name}_rows"]
        model.graph.node.insert(0, helper.make_node("Gather", inputs, [f"{stack.name}_ids"]))
        (old,) = (i for i in model.graph.input if i.name == f"{stack.name}_ids")
        model.graph.input.remove(old)
        shape: list[str | int | None] = ["batch", rows.shape[1]]
        kind = onnx.TensorProto.INT64
        model.graph.input.append(helper.make_tensor_value_info(inputs[1], kind, shape))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return lambda: session.run(["logits"], feed)[0]


@contextlib.contextmanager
def compiled_by_torch(
    python: str, scorer: Scorer, arrays: dict[str, np.ndarray], clock: str, folder: Path
) -> Iterator[Callable[[], float]]:
    """Yields a function that runs the dense part in another process and returns its milliseconds.

    Args:
        python: with torch.
        clock: "wall" or "cpu".
    """
    model = onnx.load(scorer.bundle.path / scorer.signature.model.onnx)
    nodes = []
    for node in model.graph.node:
        axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
        nodes.append((node.op_type, list(node.input), node.output[0], axis))
    stored: dict[str, Any] = {f"input {name}": array for name, array in arrays.items()}
    for tensor in model.graph.initializer:
        stored[f"constant {tensor.name}"] = numpy_helper.to_array(tensor)
    path = folder / "dense_part.npz"
    np.savez(path, nodes=json.dumps(nodes), logits=scorer.logits(arrays), **stored)
    command = [python, str(_PEER), str(path), clock]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        output, requests = process.stdout, process.stdin
        difference = float(output.readline())
        if difference > _MAX_DIFFERENCE:
            raise SystemExit(f"torch.compile must give the same logits: found {difference:.2g}")

        def run() -> float:
            print(file=requests, flush=True)
            return float(output.readline())

        yield run
        requests.close()
