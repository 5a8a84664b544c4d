"""Generated requests are answered with a score or a clear error of the client, never with 5xx."""

import asyncio
import copy
import json
import random
import struct

import numpy as np
import pytest
from asgi import call
from bundles import CANDIDATE, CONTEXT, candidates
from fuzzing import CASES
from jaxrank_serving.server.app import App
from jaxrank_serving.server.settings import Settings

NAMES = ["user", *CANDIDATE]
VALUES = [
    None, True, False, 0, -1, 7, 36.0, 1e300, -1e999, 2**31, 2**63, 10**400, 3e38, "", "1", "36.0",
    " 7", "-0", "1e5", "nan", "inf", "a|b", "|", "||", "['a', 'b']", "[1, [2]]", "t1|t2|t3", "u1",
    "\ud800", "\x00", "é" * 3, "x" * 300, [], [None], ["a", 1], [[1]], [0.5, 1], {}, {"a": 1},
    "1" * 5000, "[0x" + "f" * 5000 + "]", " " * 100_000 + "x", "<" + "," * 100_000 + "> x",
    "[" * 100_000, "List(" * 20_000 + ")", "f([" + "],b=" * 25_000 + "() x)", "'" * 100_000,
]  # fmt: skip
KEYS = ["context", "candidates", "inputs", "outputs", "id", "parameters", "x", "\ud800"]
FIELDS = ["name", "shape", "datatype", "data", "parameters", "x"]
DATATYPES = ["BOOL", "INT8", "INT32", "INT64", "UINT16", "FP16", "FP32", "FP64", "BYTES", "X", 3]
SHAPES = [
    [2],
    [1],
    [2, 1],
    [2, 2],
    [1, 2],
    [0],
    [3, 0],
    [],
    [-1],
    [2**40],
    [2] * 9,
    "2",
    [True],
    None,
]
PATHS = ["/v1/score", "/v2/models/ads/infer"]


@pytest.fixture(scope="module")
def app(bundle):
    app = App(
        Settings(bundle, timeout_ms=60_000, reload_seconds=0, batch_sizes=(8,), max_candidates=20),
        report=lambda text: None,
    )
    app.start()
    yield app
    app.close()


def score_request(r):
    tree = {"context": dict(CONTEXT), "candidates": candidates(r.randint(0, 4))}
    if r.random() < 0.3:
        rows = tree["candidates"]
        tree["candidates"] = {name: [row[name] for row in rows] for name in CANDIDATE}
    return tree


def tensor(r, name, value, rows):
    datatype = r.choice(DATATYPES) if r.random() < 0.2 else "BYTES"
    return {"name": name, "datatype": datatype, "shape": [rows], "data": [value] * rows}


def infer_request(r):
    rows = r.randint(1, 3)
    inputs = [tensor(r, name, value, rows) for name, value in CANDIDATE.items()]
    tree = {"inputs": [tensor(r, "user", "u1", 1), *inputs]}
    if r.random() < 0.3:
        tree["outputs"] = [{"name": r.choice(["click", "buy", "x"])}]
    if r.random() < 0.3:
        tree["parameters"] = {"binary_data_output": r.random() < 0.9}
    return tree


def changed(r, node):
    """Changes a value somewhere in a tree."""
    if isinstance(node, dict) and node and r.random() < 0.9:
        key = r.choice(list(node))
        action = r.random()
        if action < 0.1:
            del node[key]
        elif action < 0.2:
            node[r.choice(KEYS + NAMES + FIELDS)] = node.pop(key)
        elif key == "shape" and action < 0.7:
            node[key] = copy.deepcopy(r.choice(SHAPES))
        elif key == "datatype" and action < 0.7:
            node[key] = r.choice(DATATYPES)
        else:
            node[key] = changed(r, node[key])
        return node
    if isinstance(node, list) and node and r.random() < 0.9:
        i = r.randrange(len(node))
        action = r.random()
        if action < 0.1:
            del node[i]
        elif action < 0.2:
            node.append(copy.deepcopy(node[i]))
        else:
            node[i] = changed(r, node[i])
        return node
    return copy.deepcopy(r.choice(VALUES))


def with_binary(r, tree):
    """Moves the data of some tensors behind the JSON part."""
    parts = []
    entries = tree.get("inputs")
    for entry in entries if isinstance(entries, list) else ():
        if not isinstance(entry, dict) or r.random() < 0.5:
            continue
        data = entry.pop("data", [])
        texts = [str(v).encode(errors="replace") for v in data] if isinstance(data, list) else []
        part = b"".join(struct.pack("<I", len(t)) + t for t in texts)
        if r.random() < 0.2:
            part = r.randbytes(r.randint(0, 40))
        size = len(part) if r.random() < 0.9 else r.choice([-1, 10**9, "4", None, len(part) + 1])
        entry["parameters"] = {"binary_data_size": size}
        parts.append(part)
    head = json.dumps(tree).encode()
    length = len(head) if r.random() < 0.9 else r.choice(["", "x", -5, 10**12, len(head) - 1])
    return head + b"".join(parts), {"Inference-Header-Content-Length": length}


def generated(r):
    """Returns path, body and headers of a request."""
    path = r.choice(PATHS)
    tree = score_request(r) if path == PATHS[0] else infer_request(r)
    for _ in range(r.choice([0, 1, 1, 1, 2, 3, 6])):
        tree = changed(r, tree)
    if path != PATHS[0] and isinstance(tree, dict) and r.random() < 0.4:
        return path, *with_binary(r, tree)
    # A number of JSON that no float can hold.
    body = bytearray(json.dumps(tree).encode().replace(b"-Infinity", b"-1e999"))
    if r.random() < 0.1:
        for _ in range(r.randint(1, 4)):
            body[r.randrange(len(body))] = r.randrange(256)
    if r.random() < 0.05:
        del body[r.randrange(len(body)) :]
    return path, bytes(body), {}


def test_a_generated_request_is_scored_or_rejected_with_a_reason(app):
    r = random.Random(0)
    statuses, scorer = {}, app.repository.model.scorer

    async def all_requests():
        for _ in range(CASES):
            path, body, headers = generated(r)
            answer = await call(app, "POST", path, body, headers)
            statuses[answer.status] = statuses.get(answer.status, 0) + 1
            shown = (path, body[:2000], headers, answer)
            assert answer.status in (200, 400), shown
            if answer.status == 400:
                assert answer.json["error"], shown
                assert "field" in answer.json, shown
            elif path == PATHS[0]:
                tree = json.loads(body)
                expected = scorer.score(tree.get("context", {}), tree["candidates"])
                for name, scores in answer.json["scores"].items():
                    np.testing.assert_allclose(scores, expected[name], rtol=1e-5)

    asyncio.run(all_requests())
    print(statuses)  # with -s
    assert statuses[200] > CASES / 20
    assert statuses[400] > CASES / 5
