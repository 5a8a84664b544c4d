"""Generated requests are answered with a score or a clear error of the client, never with 5xx."""

import asyncio
import contextlib
import copy
import json
import random
import struct
import tracemalloc

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
MAX_COPIES = 20  # bytes of memory per byte of a body; objects of Python take up to 8


@pytest.fixture(scope="module")
def make_app(bundle):
    """Returns a function that starts applications, which are closed at the end."""
    with contextlib.ExitStack() as stack:

        def make(**changes):
            settings = Settings(bundle, timeout_ms=60_000, reload_seconds=0, **changes)
            app = App(settings, report=lambda text: None)
            app.start()
            stack.callback(app.close)
            return app

        yield make


def score_request(r):
    tree = {"context": dict(CONTEXT), "candidates": candidates(r.randint(0, 4))}
    if r.random() < 0.3:
        rows = tree["candidates"]
        tree["candidates"] = {name: [row[name] for row in rows] for name in CANDIDATE}
    return tree


def tensor(r, name, value, rows):
    datatype = r.choice(DATATYPES) if r.random() < 0.05 else "BYTES"
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
    for _ in range(r.choice([0, 0, 1, 1, 2, 3, 6])):
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


def large(r, kind):
    """Returns path, body and headers of a request that has very many of one thing.

    kind: number of that thing.
    """
    count = r.randint(5_000, 10_000)
    unknown = [f"unknown {i}" for i in range(count)]
    rows, names = candidates(2), dict.fromkeys(unknown, 1)
    empty = {"name": "item", "datatype": "BYTES", "shape": [2**20, 0], "data": []}
    trees = [
        {"context": CONTEXT, "candidates": [names, *[{}] * 1_000]},
        {"context": CONTEXT, "candidates": [*rows, names, *[{}] * 1_000]},
        {"context": CONTEXT, "candidates": dict.fromkeys(unknown, [1, 2])},
        {"context": CONTEXT | names, "candidates": rows},
        {"context": CONTEXT, "candidates": rows * (count // 10)},
        {"context": CONTEXT, "candidates": dict.fromkeys(CANDIDATE, [None] * count)},
        {"context": CONTEXT, "candidates": [row | {"seen": ["i1"] * count} for row in rows]},
        {"context": {"user": "u" * 10 * count}, "candidates": rows},
        {"context": CONTEXT, "candidates": rows} | names,
        {"inputs": [empty | {"name": name} for name in NAMES]},
        {"inputs": [empty | {"name": name} for name in unknown]},
        {"inputs": [tensor(r, "user", "u1", 1), tensor(r, "item", "i1", count)]},
        {"inputs": [tensor(r, name, "1", 2) for name in unknown]},
        {"inputs": [empty], "outputs": [{"name": name} for name in unknown]},
    ]
    tree = trees[kind % len(trees)]
    return PATHS["inputs" in tree], json.dumps(tree).encode(), {}


def check(app, request, answer):
    """Raises AssertionError unless an answer is right. Returns True if it compared scores."""
    path, body, headers = request
    shown = (path, body[:2000], headers, answer)
    assert answer.status in (200, 400), shown
    if answer.status == 400:
        assert answer.json["error"], shown
        assert "field" in answer.json, shown
    else:
        given = scored(body) if path == PATHS[0] else inferred(request)
        if given is None or "inference-header-content-length" in answer.headers:
            return False
        expected = app.repository.model.scorer.score(*given)
        tensors = {o["name"]: o["data"] for o in answer.json.get("outputs", ())}
        result = answer.json.get("scores", tensors)
        assert result, shown
        for name, scores in result.items():
            np.testing.assert_allclose(scores, expected[name], rtol=1e-5)
        return True
    return False


def scored(body):
    """Returns context and candidates of a request of /v1/score."""
    tree = json.loads(body)
    return tree.get("context", {}), tree["candidates"]


def inferred(request):
    """Returns context and candidates of a request of tensors, or None if some are not texts."""
    _, body, headers = request
    inputs = [] if headers else json.loads(body)["inputs"]
    columns = {}
    for entry in inputs:
        data = entry["data"]
        if entry["datatype"] != "BYTES" or not all(isinstance(v, str) for v in data):
            return None
        if entry["shape"] != [len(data)]:
            return None
        columns[entry["name"]] = data
    count = max((len(data) for data in columns.values()), default=0)
    shared = {n for n, data in columns.items() if n in CONTEXT or len(data) == 1 < count}
    context = {name: columns.pop(name)[0] for name in shared}
    return (context, columns) if columns else None


def test_a_generated_request_is_scored_or_rejected_with_a_reason(make_app):
    app = make_app(batch_sizes=(8,), max_candidates=20)
    r = random.Random(0)
    statuses, compared = {}, dict.fromkeys(PATHS, 0)

    async def all_requests():
        for _ in range(CASES):
            path, body, headers = request = generated(r)
            answer = await call(app, "POST", path, body, headers)
            statuses[answer.status] = statuses.get(answer.status, 0) + 1
            compared[path] += check(app, request, answer)

    asyncio.run(all_requests())
    print(statuses, compared)  # with -s
    assert all(number > CASES / 50 for number in compared.values())
    assert statuses[400] > CASES / 5


def test_large_requests_take_memory_of_their_size_and_stop_no_others(make_app):
    """Work for each pair of a name and a candidate is a fault, or for each row without bytes."""
    r = random.Random(1)
    app, statuses = make_app(batch_sizes=(8, 512)), set()

    async def together(requests):
        return await asyncio.gather(*(call(app, "POST", *request) for request in requests))

    for i in range(max(CASES // 100, 7)):
        whole = PATHS[0], json.dumps(score_request(r)).encode(), {}
        requests = [large(r, 2 * i), generated(r), large(r, 2 * i + 1), whole]
        tracemalloc.start()
        answers = asyncio.run(together(requests))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        for request, answer in zip(requests, answers, strict=True):
            check(app, request, answer)
        statuses |= {answers[0].status, answers[2].status}
        assert answers[-1].status == 200
        sizes = [len(body) for _, body, _ in requests]
        assert peak < 2**22 + MAX_COPIES * sum(sizes), [body[:200] for _, body, _ in requests]
    assert 400 in statuses
