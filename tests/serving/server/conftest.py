import pytest
from jaxrank_serving.server.app import App
from jaxrank_serving.server.settings import Settings


@pytest.fixture(scope="module")
def app(bundle):
    """The application with a time-out that a busy machine does not reach."""
    app = App(Settings(bundle, timeout_ms=60_000, reload_seconds=0), report=lambda text: None)
    app.start()
    yield app
    app.close()


@pytest.fixture
def make_app(bundle):
    """Returns applications with other settings, and closes them."""
    apps = []

    def make(path=bundle, start=True, report=lambda text: None, **changes):
        changes = {"timeout_ms": 60_000, "reload_seconds": 0, "batch_sizes": (8, 32)} | changes
        apps.append(App(Settings(path, **changes), report=report))
        if start:
            apps[-1].start()
        return apps[-1]

    yield make
    for app in apps:
        if app._batcher.is_alive:
            app.close()
