"""Runs the dense part of a bundle by torch.compile, in a Python that has torch.

    python benchmarks/serving/torch_peer.py MODEL.npz wall

`peers.py` starts it. MODEL.npz has the nodes of the ONNX model, its constants and the arrays of a
request. Each line of standard input runs the model once, and is answered with the milliseconds.
"""

import json
import sys
import time

import numpy as np
import torch

_FUNCTIONS = {
    "Add": torch.add,
    "Sub": torch.sub,
    "Mul": torch.mul,
    "MatMul": torch.matmul,
    "Max": torch.maximum,
    "Neg": torch.neg,
    "Exp": torch.exp,
    "Reciprocal": torch.reciprocal,
    "Identity": lambda x: x,
}


def main() -> None:
    torch.set_num_threads(1)
    clock = {"wall": time.perf_counter, "cpu": time.thread_time}[sys.argv[2]]
    stored = np.load(sys.argv[1])
    nodes = json.loads(str(stored["nodes"]))
    names = stored.files
    inputs = {n[6:]: torch.from_numpy(stored[n]) for n in names if n.startswith("input ")}
    constants = {n[9:]: torch.from_numpy(stored[n]) for n in names if n.startswith("constant ")}

    def model(values: dict[str, torch.Tensor]) -> torch.Tensor:
        values = constants | values
        for kind, operands, result, axis in nodes:
            parts = [values[name] for name in operands]
            if kind == "Concat":
                values[result] = torch.cat(parts, axis)
            elif kind == "Reshape":
                values[result] = parts[0].reshape(parts[0].shape[0], -1)
            else:
                values[result] = _FUNCTIONS[kind](*parts)
        return values["logits"]

    compiled = torch.compile(model)
    with torch.inference_mode():
        logits = compiled(inputs).numpy()
        print(float(np.abs(logits - stored["logits"]).max()), flush=True)
        for _ in sys.stdin:
            start = clock()
            compiled(inputs)
            print(1e3 * (clock() - start), flush=True)


if __name__ == "__main__":
    main()
