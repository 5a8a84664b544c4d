"""The Open Inference Protocol, with tensors in JSON and binary."""

import json
import re
import struct

import numpy as np
import pytest
from asgi import post
from bundles import CANDIDATE, CONTEXT, candidates

INFER = "/v2/models/ads/infer"
LISTS = {"pair": "|", "seen": "|"}


@pytest.fixture(scope="module")
def expected(app):
    body = {"context": CONTEXT, "candidates": candidates(3)}
    return post(app, "/v1/score", body).json["scores"]


def inputs():
    """The tensors of three candidates, one column per datatype in JSON."""
    columns = {name: [c[name] for c in candidates(3)] for name in CANDIDATE}
    tensors = [tensor("user", "BYTES", [1], ["u1"])]
    tensors.append(tensor("f0", "FP64", [3], list(map(float, columns.pop("f0")))))
    tensors.append(tensor("f1", "FP32", [3, 1], [[-20.0], [-20], [-20.0]]))
    tensors.append(tensor("number", "INT32", [3], list(map(int, columns.pop("number")))))
    tensors.append(tensor("age", "UINT8", [3], [33, 33, 33]))
    tensors.append(tensor("pair", "BYTES", [3, 2], [["p1", "p2"]] * 3))
    rest = columns.keys() - {"f1", "age", "pair"}
    tensors += [tensor(name, "BYTES", [3], columns[name]) for name in sorted(rest)]
    return tensors


def tensor(name, datatype, shape, data):
    return {"name": name, "datatype": datatype, "shape": shape, "data": data}


def as_binary(entry):
    """Returns a tensor without its data, and the data as the protocol's binary extension has it."""
    flat = np.array(entry.pop("data"), object).ravel().tolist()
    if entry["datatype"] == "BYTES":
        data = b"".join(struct.pack("<I", len(v.encode())) + v.encode() for v in flat)
    else:
        kinds = {"FP64": "<f8", "FP32": "<f4", "INT32": "<i4", "UINT8": "u1"}
        data = np.array(flat, kinds[entry["datatype"]]).tobytes()
    return entry | {"parameters": {"binary_data_size": len(data)}}, data


def post_binary(app, tree, parts):
    head = json.dumps(tree).encode()
    headers = {"Inference-Header-Content-Length": len(head)}
    return post(app, INFER, head + b"".join(parts), headers)


def test_tensors_in_json_have_the_scores_of_the_same_values(app, expected):
    answer = post(app, INFER, {"id": "7", "inputs": inputs(), "parameters": {"any": 1}})
    assert answer.status == 200, answer.body
    assert answer.json["id"] == "7"
    assert answer.json["model_name"] == "ads"
    outputs = {output["name"]: output for output in answer.json["outputs"]}
    assert outputs.keys() == expected.keys()
    for name, output in outputs.items():
        assert (output["datatype"], output["shape"]) == ("FP64", [3])
        np.testing.assert_allclose(output["data"], expected[name], rtol=1e-5)


@pytest.mark.parametrize("select", [False, True])
def test_binary_tensors_go_in_and_out(app, expected, select):
    entries, parts = zip(*map(as_binary, inputs()), strict=True)
    tree = {"inputs": list(entries)}
    if select:
        binary = {"name": "buy", "parameters": {"binary_data": True}}
        tree["outputs"] = [binary, {"name": "click"}]
    else:
        tree["parameters"] = {"binary_data_output": True}
    answer = post_binary(app, tree, parts)
    assert answer.status == 200, answer.body
    assert answer.headers["content-type"] == "application/octet-stream"
    length = int(answer.headers["inference-header-content-length"])
    outputs, rest = json.loads(answer.body[:length])["outputs"], answer.body[length:]
    assert [o["name"] for o in outputs] == (["buy", "click"] if select else list(expected))
    for output in outputs:
        if "data" in output:
            assert select
            values = output["data"]
        else:
            size = output["parameters"]["binary_data_size"]
            values, rest = np.frombuffer(rest[:size], "<f8"), rest[size:]
        np.testing.assert_allclose(values, expected[output["name"]], rtol=1e-5)
    assert not rest


def test_null_and_nan_are_missing_values(app):
    missing = [c | {"f0": "", "number": None} for c in candidates(3)]
    expected = post(app, "/v1/score", {"context": CONTEXT, "candidates": missing}).json["scores"]
    tensors = {entry["name"]: entry for entry in inputs()}
    tensors["number"]["data"] = [None] * 3
    tensors["f0"]["data"] = [float("nan")] * 3
    tensors["f0"], part = as_binary(tensors["f0"])
    answer = post_binary(app, {"inputs": list(tensors.values())}, [part])
    assert answer.status == 200, answer.body
    np.testing.assert_allclose(answer.json["outputs"][0]["data"], expected["click"], rtol=1e-6)


def changed(name, /, **fields):
    return [entry | fields if entry["name"] == name else entry for entry in inputs()]


@pytest.mark.parametrize(
    ("tree", "field", "message"),
    [
        ({}, "inputs", "must be a list of tensors: found None"),
        ({"inputs": [3]}, "inputs[0]", "must be an object"),
        ({"inputs": inputs(), "id": 3}, "id", "must be text: found 3"),
        ({"inputs": [*inputs(), inputs()[1]]}, "inputs[11].name", "one tensor only: found 'f0'"),
        ({"inputs": changed("f0", name="f9")}, "inputs", "must be columns of the model, .*'f9'"),
        ({"inputs": changed("f0", datatype="FP8")}, "inputs[1].datatype", "one of BYTES, .*'FP8'"),
        ({"inputs": changed("f0", shape=[-1])}, "inputs[1].shape", "list of 1 to 8 sizes"),
        ({"inputs": changed("f0", shape=[2**40, 0])}, "inputs[1].shape", "list of 1 to 8 sizes"),
        ({"inputs": changed("f0", shape=[4])}, "inputs[1].data", "must be 4 values.*found 3"),
        ({"inputs": changed("f1", shape=[1, 3])}, "inputs[2].data", "nested as the shape"),
        ({"inputs": changed("f0", data="abc")}, "inputs[1].data", "must be a list: found 'abc'"),
        (
            {"inputs": changed("number", data=[1, 2**31, 3])},
            "inputs[3].data[1]",
            "must be of datatype INT32, or null: found 2147483648",
        ),
        ({"inputs": changed("age", data=[1, True, 3])}, "inputs[4].data[1]", "UINT8.*True"),
        (
            {"inputs": changed("user", shape=[3], data=["u1"] * 3)},
            "user",
            r"must be of shape \[1\].*found \[3\]",
        ),
        ({"inputs": inputs()[:1]}, "inputs", "tensors of candidates too"),
        ({"inputs": inputs()[:-1]}, "tags", "must be given"),
        (
            {"inputs": inputs(), "outputs": [{"name": "clik"}]},
            "outputs[0].name",
            "one of click, buy, buy_given_click: found 'clik'",
        ),
        (
            {"inputs": inputs(), "outputs": [{"name": "buy", "parameters": {"classification": 1}}]},
            "outputs[0].parameters.classification",
            "not supported",
        ),
        (
            {"inputs": changed("f0", parameters={"binary_data_size": 24})},
            "inputs[1].parameters.binary_data_size",
            "of the 0 that are left: found 24",
        ),
    ],
)
def test_errors_name_the_tensor(app, tree, field, message):

    answer = post(app, INFER, tree)
    assert answer.status == 400
    assert re.search(message, answer.json["error"])
    assert answer.json["field"] == field


def test_an_empty_tensor_of_too_many_candidates_is_rejected(app):
    tree = {"inputs": [tensor("item", "BYTES", [2**20, 0], [])]}
    answer = post(app, INFER, tree)
    assert answer.status == 400
    assert answer.json["error"] == "candidates: must be at most 2,000: found 1,048,576."


@pytest.mark.parametrize(
    ("part", "shape", "message"),
    [
        (b"\x01\0\0\0a\x01\0\0\0", [2], "within its bytes; text 1 ends at 10: found 9"),
        (b"\x01\0\0\0a", [2], "must be 2 texts with their lengths: found '1'"),
        (b"\x01\0\0\0a\0", [1], "must be 5 bytes, as its texts take: found 6"),
        (b"\xff\xff\xff\xffa", [1], "text 0 ends at 4,294,967,299"),
        (b"\x01\0\0\0\xff", [1], "text in UTF-8"),
    ],
)
def test_binary_texts_are_checked(app, part, shape, message):
    entry = {"name": "item", "datatype": "BYTES", "shape": shape}
    entry["parameters"] = {"binary_data_size": len(part)}
    answer = post_binary(app, {"inputs": [entry]}, [part])
    assert answer.status == 400
    assert message in answer.json["error"]


def test_the_length_of_the_json_part_is_checked(app):
    body = json.dumps({"inputs": inputs()}).encode()
    for length in ("-1", "x", len(body) + 1, "9" * 5000, "²"):
        answer = post(app, INFER, body, {"Inference-Header-Content-Length": length})
        assert (answer.status, answer.json["field"]) == (400, "Inference-Header-Content-Length")
    answer = post(app, INFER, body + b"abc", {"Inference-Header-Content-Length": len(body)})
    assert (
        "must be 0 bytes behind the JSON part, as the inputs declare: found 3"
        in (answer.json["error"])
    )
