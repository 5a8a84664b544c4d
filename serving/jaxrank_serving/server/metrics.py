"""Prometheus metrics of a server and of its loaded version."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from jaxrank_serving.server.model import Model

_MILLISECONDS = (0.5, 1, 2, 3, 5, 7.5, 10, 15, 20, 30, 50, 100, 250, 500, 1000, 2500, 5000)
_SECONDS = tuple(ms / 1000 for ms in _MILLISECONDS)
_COUNTS = tuple(2.0**i for i in range(13))
_Measured = TypeVar("_Measured", Counter, Histogram)
CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


class Family(NamedTuple):
    """A metric: its name without the suffix of its type, and what it measures."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str
    unit: str = ""


FAMILIES = (
    Family("jaxrank_requests", "counter", ("endpoint", "code"), "Answered requests."),
    Family(
        "jaxrank_request_seconds",
        "histogram",
        ("endpoint",),
        "Time from the headers of a request to its response.",
        "s",
    ),
    Family(
        "jaxrank_queue_seconds",
        "histogram",
        (),
        "Time that a request waits for the thread that scores.",
        "s",
    ),
    Family("jaxrank_batch_requests", "histogram", (), "Requests of a batch."),
    Family("jaxrank_batch_candidates", "histogram", (), "Candidates of a batch, before padding."),
    Family("jaxrank_active_requests", "gauge", (), "Requests in work."),
    Family(
        "jaxrank_queue_requests", "gauge", (), "Requests in the queue of the thread that scores."
    ),
    Family("jaxrank_loads", "counter", (), "Loaded versions."),
    Family("jaxrank_load_failures", "counter", (), "Versions that could not be loaded."),
    Family(
        "jaxrank_model_info", "gauge", ("model", "version", "checkpoint"), "The loaded version."
    ),
    Family("jaxrank_scores", "counter", ("version", "output"), "Scored candidates."),
    Family("jaxrank_score_sum", "counter", ("version", "output"), "Sum of the scores."),
    Family(
        "jaxrank_feature_values",
        "counter",
        ("version", "feature"),
        "Values of a feature. A value of the context counts once per request.",
    ),
    Family(
        "jaxrank_feature_states",
        "counter",
        ("version", "feature", "state"),
        "Values of a feature that are missing, unknown, out_of_range or truncated.",
    ),
    Family(
        "jaxrank_feature_share",
        "gauge",
        ("version", "feature", "state"),
        "Fraction of a feature's values that are missing or unknown since loading.",
    ),
    Family(
        "jaxrank_data_score_mean",
        "gauge",
        ("version", "output"),
        "Mean score of the validation data.",
    ),
    Family(
        "jaxrank_data_label_mean",
        "gauge",
        ("version", "output"),
        "Mean label of the validation data.",
    ),
    Family(
        "jaxrank_data_feature_share",
        "gauge",
        ("version", "feature", "state"),
        "Fraction of a feature's values in the validation data that are missing or unknown.",
    ),
)
_BY_NAME = {family.name: family for family in FAMILIES}
_KINDS = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}


def _family(name: str) -> CounterMetricFamily | GaugeMetricFamily:
    """Returns a metric without values."""
    family = _BY_NAME[name]
    return _KINDS[family.kind](name, family.text, labels=family.labels)


class Metrics:
    """Metrics of a server.

    Attributes:
        requests: number of answered requests by endpoint and status.
        seconds: time from the headers of a request to its response, by endpoint.
        queue_seconds: time that a request waits for the thread that scores.
        batch_requests, batch_candidates: sizes of batches before padding.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._made(Counter, "jaxrank_requests")
        self.seconds = self._made(Histogram, "jaxrank_request_seconds", buckets=_SECONDS)
        self.queue_seconds = self._made(Histogram, "jaxrank_queue_seconds", buckets=_SECONDS)
        self.batch_requests = self._made(Histogram, "jaxrank_batch_requests", buckets=_COUNTS[:8])
        self.batch_candidates = self._made(Histogram, "jaxrank_batch_candidates", buckets=_COUNTS)

    def _made(self, kind: Callable[..., _Measured], name: str, **settings: Any) -> _Measured:
        family = _BY_NAME[name]
        return kind(name, family.text, family.labels, registry=self.registry, **settings)

    def add(self, name: str, value: Callable[[], float]) -> None:
        """Adds a number that is read when the metrics are."""
        self.registry.register(_Value(name, value))

    def add_model(self, model: Callable[[], Model]) -> None:
        """Adds the metrics of the version that a function returns."""
        self.registry.register(_ModelCollector(model))

    def text(self) -> bytes:
        """Returns all metrics in Prometheus's text format."""
        return generate_latest(self.registry)


class _Value(Collector):
    """A number that is computed when it is read."""

    def __init__(self, name: str, value: Callable[[], float]):
        self._name, self._value = name, value

    def collect(self) -> Iterator[Metric]:
        """Yields the metric."""
        family = _family(self._name)
        family.add_metric([], self._value())
        yield family


class _ModelCollector(Collector):
    """Metrics of the loaded version, whose label is `version`."""

    def __init__(self, model: Callable[[], Model]):
        self._model = model

    def describe(self) -> Iterator[Metric]:
        """Yields nothing, because names are read from `collect`."""
        yield from ()

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics."""
        model = self._model()
        yield _info(model)
        yield from _scores(model)
        yield from _features(model)
        yield from _data(model)


def _info(model: Model) -> Metric:
    family = _family("jaxrank_model_info")
    checkpoint = str(model.scorer.signature.origin.get("checkpoint", ""))
    family.add_metric([model.name, model.version, checkpoint], 1)
    return family


def _scores(model: Model) -> Iterator[Metric]:
    count = _family("jaxrank_scores")
    total = _family("jaxrank_score_sum")
    for output, statistics in model.statistics().items():
        count.add_metric([model.version, output], statistics.candidates)
        total.add_metric([model.version, output], statistics.sum)
    yield from (count, total)


def _data(model: Model) -> Iterator[Metric]:
    """Yields statistics of the data that the model was evaluated with."""
    scores = _family("jaxrank_data_score_mean")
    observed = _family("jaxrank_data_label_mean")
    shares = _family("jaxrank_data_feature_share")
    signature = model.scorer.signature
    tasks = {task.task: task for task in signature.statistics.tasks}
    for output in signature.outputs:
        # A conditional output has no label mean: its labels are not the task's.
        task = None if output.parent else tasks.get(output.task)
        if task is not None and task.score_mean is not None:
            scores.add_metric([model.version, output.name], task.score_mean)
        if task is not None and task.label_mean is not None:
            observed.add_metric([model.version, output.name], task.label_mean)
    for feature in signature.statistics.features:
        for state in ("missing", "unknown"):
            share = getattr(feature, state)
            if share is not None:
                shares.add_metric([model.version, feature.name, state], share)
    yield from (scores, observed, shares)


def _features(model: Model) -> Iterator[Metric]:
    values = _family("jaxrank_feature_values")
    states = _family("jaxrank_feature_states")
    shares = _family("jaxrank_feature_share")
    for feature, counts in model.scorer.counts().items():
        values.add_metric([model.version, feature], counts.values)
        for state in ("missing", "unknown", "out_of_range", "truncated"):
            number = getattr(counts, state)
            states.add_metric([model.version, feature, state], number)
            if state in ("missing", "unknown") and counts.values:
                shares.add_metric([model.version, feature, state], number / counts.values)
    yield from (values, states, shares)
