"""Newer versions are verified and loaded, and damaged ones leave the old one in place."""

import asyncio
import shutil
import threading
import time
import weakref

import bundles
import numpy as np
import pytest
from asgi import call, get, post
from bundles import CONTEXT, candidates, point
from jaxrank_serving import BundleError
from jaxrank_serving.bundle import open_bundle
from jaxrank_serving.server import model as models
from jaxrank_serving.server.repository import BusyError

LOAD = "/v2/repository/models/ads/load"
REQUEST = {"context": CONTEXT, "candidates": candidates(2)}


@pytest.fixture(scope="module")
def newer(bundle, tmp_path_factory):
    return bundles.other_version(bundle, tmp_path_factory.mktemp("newer") / "bundle")


def version(folder):
    return open_bundle(folder).version


def damage(folder):
    with open(folder / "tables" / "dim4.bin", "r+b") as file:
        file.seek(40)
        file.write(b"\x01\x02")


def test_a_new_target_of_a_link_is_loaded_on_request(make_app, bundle, newer, tmp_path):
    point(tmp_path / "ads", bundle)
    app = make_app(tmp_path / "ads")
    assert post(app, LOAD).json == {"name": "ads", "version": version(bundle), "loaded": False}
    assert post(app, "/v1/score", REQUEST).json["version"] == version(bundle)
    old = weakref.ref(app.repository.model)
    point(tmp_path / "ads", newer)
    assert post(app, LOAD).json == {"name": "ads", "version": version(newer), "loaded": True}
    # Its tables are unmapped as soon as the thread that scored is done with its last request.
    until = time.monotonic() + 60
    while old() is not None and time.monotonic() < until:
        time.sleep(0.001)
    assert old() is None
    assert post(app, "/v1/score", REQUEST).json["version"] == version(newer)
    assert f'version="{version(newer)}"' in get(app, "/metrics").body.decode()
    point(tmp_path / "ads", bundle)
    assert post(app, LOAD).json["version"] == version(bundle) != version(newer)


def test_the_last_version_by_name_is_served_and_a_damaged_one_is_reported(
    make_app, bundle, newer, tmp_path
):
    folder, lines = tmp_path / "ads", []
    folder.mkdir()
    shutil.copytree(bundle, folder / "v9")
    app = make_app(folder, report=lines.append)
    shutil.copytree(newer, folder / "v10")
    damage(folder / "v10")
    answer = post(app, LOAD)
    assert answer.status == 409
    assert "v10/tables/dim4.bin: is corrupt" in answer.json["error"]
    assert answer.json["version"] == version(bundle)
    assert any("dim4.bin: is corrupt" in line for line in lines)
    assert post(app, "/v1/score", REQUEST).json["version"] == version(bundle)
    assert "jaxrank_load_failures_total 1.0" in get(app, "/metrics").body.decode()
    loaded, failed = post(app, "/v2/repository/index").json
    assert loaded == {"name": "ads", "version": version(bundle), "state": "READY"}
    assert "dim4.bin: is corrupt" in failed["reason"]
    # Without a change it is not read again.
    assert post(app, LOAD).status == 409
    assert "jaxrank_load_failures_total 1.0" in get(app, "/metrics").body.decode()
    shutil.copytree(newer, folder / "v10", dirs_exist_ok=True)
    assert post(app, LOAD).json == {"name": "ads", "version": version(newer), "loaded": True}


def test_a_server_starts_with_the_last_version_that_is_whole(make_app, bundle, newer, tmp_path):
    shutil.copytree(bundle, tmp_path / "1")
    shutil.copytree(newer, tmp_path / "2")
    (tmp_path / "2" / "vocabularies.bin").unlink()
    shutil.copytree(newer, tmp_path / ".3")  # hidden: it is being copied
    app = make_app(tmp_path, name="ads")
    assert post(app, "/v1/score", REQUEST).json["version"] == version(bundle)
    assert "vocabularies.bin: must exist" in app.repository.errors[0]


def test_a_server_does_not_start_without_a_version(make_app, bundle, tmp_path):
    with pytest.raises(BundleError, match="must be a bundle, or a directory of bundles"):
        make_app(tmp_path)
    with pytest.raises(BundleError, match="must be a bundle"):
        make_app(tmp_path / "nothing")
    shutil.copytree(bundle, tmp_path / "1")
    damage(tmp_path / "1")
    with pytest.raises(BundleError, match="dim4.bin: is corrupt"):
        make_app(tmp_path)
    make_app(tmp_path, skip_verify=True)


def _nan(scorer, arrays):
    rows = len(next(iter(arrays.values())))
    return np.full((rows, len(scorer.signature.outputs)), np.nan, np.float32)


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        (lambda scorer, arrays: 1 / 0, "score a request without values: found ZeroDivisionError"),
        (_nan, "give a request without values a finite score: found nan of"),
    ],
)
def test_a_version_that_cannot_score_is_not_loaded(
    logits, message, make_app, bundle, newer, tmp_path, monkeypatch
):
    point(tmp_path / "ads", bundle)
    app = make_app(tmp_path / "ads")
    point(tmp_path / "ads", newer)
    monkeypatch.setattr(models.Scorer, "logits", logits)
    answer = post(app, LOAD)
    assert answer.status == 409
    assert f"must {message}" in answer.json["error"]
    with pytest.raises(BundleError, match=message):
        make_app(tmp_path / "ads")


def test_the_watcher_loads_a_newer_version_while_requests_are_scored(
    make_app, bundle, newer, tmp_path
):
    point(tmp_path / "ads", bundle)
    app = make_app(tmp_path / "ads", reload_seconds=0.01)
    point(tmp_path / "ads", newer)
    versions = []
    while version(newer) not in versions:
        answer = post(app, "/v1/score", REQUEST)
        assert answer.status == 200
        versions.append(answer.json["version"])
    assert set(versions) <= {version(bundle), version(newer)}


def test_requests_that_wait_are_scored_by_the_version_they_met_also_while_it_stops(
    make_app, bundle, newer, tmp_path
):
    point(tmp_path / "ads", bundle)
    app = make_app(tmp_path / "ads", start=False, batch_delay_us=200_000)

    async def queue():
        tasks = []
        for target in (bundle, newer, newer, bundle):
            point(tmp_path / "ads", target)
            await call(app, "POST", LOAD)
            tasks.append(asyncio.create_task(call(app, "POST", "/v1/score", REQUEST)))
            while app._batcher.waiting < len(tasks):
                await asyncio.sleep(0.001)
        app.start()
        await asyncio.to_thread(app.close)
        return await asyncio.gather(*tasks)

    versions = [answer.json["version"] for answer in asyncio.run(queue())]
    assert versions == [version(target) for target in (bundle, newer, newer, bundle)]
    assert "jaxrank_batch_requests_count 3.0" in get(app, "/metrics").body.decode()


def test_one_check_runs_at_a_time(make_app, bundle, newer, tmp_path, monkeypatch):
    point(tmp_path / "ads", bundle)
    app = make_app(tmp_path / "ads")
    point(tmp_path / "ads", newer)
    entered, leave = threading.Event(), threading.Event()
    load = app.repository._load

    def slow(path, verify):
        entered.set()
        assert leave.wait(60)
        return load(path, verify)

    monkeypatch.setattr(app.repository, "_load", slow)
    thread = threading.Thread(target=app.repository.refresh)
    thread.start()
    assert entered.wait(60)
    with pytest.raises(BusyError):
        app.repository.refresh()
    assert post(app, LOAD).status == 429
    assert post(app, "/v1/score", REQUEST).json["version"] == version(bundle)
    leave.set()
    thread.join()
    assert post(app, "/v1/score", REQUEST).json["version"] == version(newer)
