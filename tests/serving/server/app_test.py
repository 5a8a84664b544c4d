"""The routes and limits of the server, called in the process."""

import asyncio
import re
import time

import jaxrank_serving
import numpy as np
import pytest
from asgi import call, get, post
from bundles import CANDIDATE, CONTEXT, candidates
from jaxrank_serving.server import protocol
from jaxrank_serving.server.metrics import FAMILIES
from prometheus_client.parser import text_string_to_metric_families

REQUEST = {"context": CONTEXT, "candidates": candidates(5)}


@pytest.fixture(scope="module")
def scorer(bundle):
    return jaxrank_serving.load(bundle)


def test_scores_are_those_of_the_scorer(app, scorer):
    expected = scorer.score(CONTEXT, candidates(5))
    answer = post(app, "/v1/score", REQUEST)
    assert answer.status == 200
    assert answer.json["model"] == "ads"
    assert answer.json["version"] == scorer.bundle.version
    assert answer.json["scores"].keys() == {"click", "buy", "buy_given_click"}
    columns = {name: [c[name] for c in candidates(5)] for name in CANDIDATE}
    by_columns = post(app, "/v1/score", {"context": CONTEXT, "candidates": columns})
    assert by_columns.body == answer.body
    for name, scores in answer.json["scores"].items():
        assert np.std(scores) > 1e-4
        np.testing.assert_allclose(scores, expected[name], rtol=1e-5)
    empty = post(app, "/v1/score", {"context": CONTEXT, "candidates": []})
    assert empty.json["scores"] == {"click": [], "buy": [], "buy_given_click": []}


def test_joined_padded_and_divided_batches_have_the_scores_of_single_requests(
    make_app, scorer, monkeypatch
):
    app = make_app(batch_delay_us=200_000, batch_sizes=(32, 8))
    logits, padded = app.repository.model.scorer.logits, []

    def recorded(arrays):
        padded.extend({len(array) for array in arrays.values()})
        return logits(arrays)

    monkeypatch.setattr(app.repository.model.scorer, "logits", recorded)
    sizes = [1, 2, 7, 31, 32, 33, 70]

    async def all_at_once():
        bodies = [{"context": CONTEXT, "candidates": candidates(size)} for size in sizes]
        return await asyncio.gather(*(call(app, "POST", "/v1/score", body) for body in bodies))

    answers = asyncio.run(all_at_once())
    for size, answer in zip(sizes, answers, strict=True):
        expected = scorer.score(CONTEXT, candidates(size))["click"]
        np.testing.assert_allclose(answer.json["scores"]["click"], expected, rtol=1e-5)
    metrics = get(app, "/metrics").body.decode()
    assert "jaxrank_batch_candidates_sum 176.0" in metrics
    batches = float(re.search(r"jaxrank_batch_requests_count (\S+)", metrics)[1])
    assert 1 <= batches < len(sizes)
    assert set(padded) == {8, 32}


def test_an_invalid_request_does_not_fail_its_batch(make_app):
    app = make_app(batch_delay_us=200_000)
    wrong = {"context": CONTEXT, "candidates": [CANDIDATE | {"number": "x"}]}

    async def together():
        bodies = [REQUEST, wrong, REQUEST]
        return await asyncio.gather(*(call(app, "POST", "/v1/score", body) for body in bodies))

    statuses = [answer.status for answer in asyncio.run(together())]
    assert statuses == [200, 400, 200]


def test_health_and_metadata(app, scorer):
    version = scorer.bundle.version
    assert get(app, "/v2/health/live").json == {"live": True}
    assert get(app, "/v2/health/ready").json == {"ready": True}
    assert "binary_tensor_data" in get(app, "/v2").json["extensions"]
    for path in ("/v2/models/ads", f"/v2/models/ads/versions/{version}"):
        assert get(app, f"{path}/ready").json == {"name": "ads", "ready": True}
        described = get(app, path).json
        assert described["versions"] == [version]
        inputs = {entry["name"]: entry for entry in described["inputs"]}
        assert inputs.keys() == {"user", *CANDIDATE}
        assert inputs["user"]["shape"] == [1]
        assert inputs["item"] == {
            "name": "item",
            "datatype": "BYTES",
            "shape": [-1],
            "parameters": {"source": "candidate", "required": True},
        }
        assert [output["name"] for output in described["outputs"]] == [
            "click", "buy", "buy_given_click",
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "field", "message"),
    [
        ("GET", "/", b"", 404, None, "path: must be one of the API's: found '/'"),
        ("GET", "/v2/models/other", b"", 404, "model", "must be 'ads': found 'other'"),
        ("GET", "/v2/models/ads/versions/1", b"", 404, "version", "found '1'"),
        ("POST", "/v2/models/ads/versions/1/infer", b"", 404, "version", "found '1'"),
        ("GET", "/v1/score", b"", 405, "method", "must be POST: found 'GET'"),
        ("POST", "/metrics", b"", 405, "method", "must be GET: found 'POST'"),
        ("POST", "/v1/score", b"{", 400, "body", "body: must be JSON: "),
        ("POST", "/v1/score", b"\xff", 400, "body", "body: must be JSON: .*utf-8"),
        ("POST", "/v1/score", b"[" * 100_000, 400, "body", "not be nested this deeply"),
        ("POST", "/v1/score", b"[1]", 400, "body", r"must be an object: found \[1\]"),
        ("POST", "/v1/score", b'{"candidates": [NaN]}', 400, "body", "NaN is not a number"),
        ("POST", "/v1/score", {"candidate": []}, 400, "candidate", "one of context, candidates"),
        ("POST", "/v1/score", {"context": 1}, 400, "context", "must be an object: found 1"),
        ("POST", "/v1/score", {}, 400, "candidates", "must be a list of objects"),
        ("POST", "/v1/score", {"candidates": [1]}, 400, "candidate", "candidate 0"),
        ("POST", "/v1/score", {"candidates": [CANDIDATE]}, 400, "user", "user: must be given"),
        (
            "POST",
            "/v1/score",
            {"context": CONTEXT, "candidates": [CANDIDATE, CANDIDATE | {"f0": "a"}]},
            400,
            "f0",
            "candidate 1, f0: must be a finite number or empty: found 'a'",
        ),
    ],
)
def test_errors_name_the_field(app, method, path, body, status, field, message):
    answer = asyncio.run(call(app, method, path, body))
    assert answer.status == status
    assert answer.json.get("field") == field
    assert re.search(message, answer.json["error"])


def test_a_body_above_the_limit_is_rejected_before_it_is_read(make_app):
    app = make_app(max_body_bytes=100)
    answer = post(app, "/v1/score", b"{}", {"Content-Length": 101})
    assert answer.status == 413
    assert "body: must have at most 100 bytes: found 101" in answer.json["error"]
    read = 0

    async def endless():
        nonlocal read
        read += 1
        return {"type": "http.request", "body": b" " * 30, "more_body": True}

    assert post(app, "/v1/score", receive=endless).status == 413
    assert read == 4
    assert post(app, "/v1/score", b"{}", {"Content-Encoding": "gzip"}).status == 415


def test_too_many_candidates_are_rejected(make_app):
    app = make_app(max_candidates=4)
    answer = post(app, "/v1/score", REQUEST)
    assert (answer.status, answer.json["field"]) == (400, "candidates")
    assert answer.json["error"] == "candidates: must be at most 4: found 5."


def test_requests_beyond_the_queue_are_rejected_and_late_ones_time_out(make_app):
    app = make_app(start=False, max_requests=2, timeout_ms=200)

    async def three():
        return await asyncio.gather(*(call(app, "POST", "/v1/score", REQUEST) for _ in range(3)))

    answers = asyncio.run(three())
    assert [answer.status for answer in answers] == [504, 504, 429]
    assert "timeout_ms: must be" in answers[0].json["error"]
    assert "max_requests: must be at most 2" in answers[2].json["error"]
    assert answers[2].headers["retry-after"] == "1"
    # The queue is full of requests that have timed out, until the thread drops them.
    assert post(app, "/v1/score", REQUEST).status == 429
    app.start()
    while app._batcher.waiting:
        time.sleep(0.01)
    assert "jaxrank_batch_requests_count 0.0" in get(app, "/metrics").body.decode()


def test_requests_that_are_being_read_count(make_app):
    app = make_app(max_requests=1, timeout_ms=300)

    async def stalls():
        await asyncio.sleep(60)

    async def both():
        reading = asyncio.create_task(call(app, "POST", "/v1/score", receive=stalls))
        await asyncio.sleep(0)
        return (await call(app, "POST", "/v1/score", REQUEST)), await reading

    assert [answer.status for answer in asyncio.run(both())] == [429, 408]


def test_a_client_that_stalls_or_disconnects_is_answered(make_app):
    app = make_app(timeout_ms=100)

    async def stalls():
        await asyncio.sleep(60)

    async def disconnects():
        return {"type": "http.disconnect"}

    answer = post(app, "/v1/score", receive=stalls)
    assert (answer.status, answer.json["field"]) == (408, "body")
    answer = post(app, "/v1/score", receive=disconnects)
    assert (answer.status, answer.json["field"]) == (400, "body")
    assert app.active == 0


def test_a_number_that_is_too_large_for_the_model_is_rejected(make_app, scorer):
    app = make_app()
    rows = [CANDIDATE, CANDIDATE | {"f0": "3e38"}]
    with np.errstate(all="ignore"):
        assert np.isnan(scorer.score(CONTEXT, rows)["click"][1])
    answer = post(app, "/v1/score", {"context": CONTEXT, "candidates": rows})
    assert (answer.status, answer.json["field"]) == (400, "candidates")
    assert "candidate 1, click: must have a finite score: found nan" in answer.json["error"]
    text = get(app, "/metrics").body.decode()
    assert not re.search(r"jaxrank_score_sum_total.* nan$", text, re.IGNORECASE | re.MULTILINE)


def test_a_failure_of_the_server_is_500_and_the_next_request_is_scored(make_app, monkeypatch):
    app = make_app()
    with monkeypatch.context() as patch:
        patch.setattr(app.repository.model, "score", lambda requests: 1 / 0)
        answer = post(app, "/v1/score", REQUEST)
    assert answer.status == 500
    assert "log" in answer.json["error"]
    assert post(app, "/v1/score", REQUEST).status == 200


def test_metrics_have_latency_scores_and_values_of_features(make_app):
    app = make_app()
    missing = [candidate | {"item": "", "code": None} for candidate in candidates(3)]
    answer = post(app, "/v1/score", {"context": {"user": "new"}, "candidates": missing})
    post(app, "/v1/score", b"{")
    text = get(app, "/metrics").body.decode()
    version = answer.json["version"]
    total = sum(answer.json["scores"]["click"])
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
    values = {name: float(value) for name, value in lines.items()}
    assert values['jaxrank_requests_total{code="200",endpoint="score"}'] == 1
    assert values['jaxrank_requests_total{code="400",endpoint="score"}'] == 1
    assert values['jaxrank_request_seconds_count{endpoint="score"}'] == 2
    assert values["jaxrank_queue_requests"] == values["jaxrank_active_requests"] == 0
    assert values["jaxrank_loads_total"] == 1
    of_click = f'{{output="click",version="{version}"}}'
    assert values[f"jaxrank_scores_total{of_click}"] == 3
    assert values[f"jaxrank_score_sum_total{of_click}"] == pytest.approx(total)

    def share(feature, state, kind=""):
        labels = f'feature="{feature}",state="{state}",version="{version}"'
        return values[f"jaxrank_{kind}feature_share{{{labels}}}"]

    recorded = app.repository.model.scorer.signature.statistics
    (click, _), features = recorded.tasks, {f.name: f for f in recorded.features}
    assert values[f"jaxrank_data_label_mean{of_click}"] == click.label_mean
    assert 0.3 < click.label_mean < 0.7
    assert f'jaxrank_data_label_mean{{output="buy_given_click",version="{version}"}}' not in values
    assert share("user", "unknown", "data_") == features["user"].unknown > 0
    assert share("item", "missing") == share("code", "missing") == 1
    assert share("user", "unknown") == 1
    assert share("age", "missing") == 0


@pytest.mark.parametrize("route", protocol.ROUTES, ids=lambda route: route.path)
def test_the_declared_routes_are_answered_by_their_method_only(app, route):
    path = route.path.replace("NAME", "ads").replace("VERSION", app.repository.model.version)
    other = {"GET": "POST", "POST": "PUT"}[route.method]
    answer = asyncio.run(call(app, other, path))
    assert answer.status == 405
    assert route.method in answer.headers["allow"].split(", ")
    if not route.request:
        assert asyncio.run(call(app, route.method, path)).status == 200


def test_the_declared_metrics_are_those_of_the_server(app):
    """`call` compares the keys of answers in JSON."""
    post(app, "/v1/score", REQUEST)
    text = get(app, "/metrics").body.decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    created = {name for name in families if name.endswith("_created")}
    assert families.keys() - created == {family.name for family in FAMILIES}
    for family in FAMILIES:
        shown = families[family.name]
        assert (shown.type, shown.documentation) == (family.kind, family.text)
        # This bundle has no statistics of its validation data.
        assert shown.samples or family.name.startswith("jaxrank_data_"), family.name
        for sample in shown.samples:
            assert sample.labels.keys() - {"le"} == set(family.labels)
