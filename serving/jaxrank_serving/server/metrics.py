"""Prometheus metrics of a server and of its loaded version."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from jaxrank_serving.server.model import Model

_MILLISECONDS = (0.5, 1, 2, 3, 5, 7.5, 10, 15, 20, 30, 50, 100, 250, 500, 1000, 2500, 5000)
_SECONDS = tuple(ms / 1000 for ms in _MILLISECONDS)
_COUNTS = tuple(2.0**i for i in range(13))
CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


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
        self.requests = Counter(
            "jaxrank_requests",
            "Answered requests.",
            ["endpoint", "code"],
            registry=self.registry,
        )
        self.seconds = Histogram(
            "jaxrank_request_seconds",
            "Time from the headers of a request to its response.",
            ["endpoint"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.queue_seconds = Histogram(
            "jaxrank_queue_seconds",
            "Time that a request waits for the thread that scores.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.batch_requests = Histogram(
            "jaxrank_batch_requests",
            "Requests of a batch.",
            buckets=_COUNTS[:8],
            registry=self.registry,
        )
        self.batch_candidates = Histogram(
            "jaxrank_batch_candidates",
            "Candidates of a batch, before padding.",
            buckets=_COUNTS,
            registry=self.registry,
        )

    def add(self, name: str, text: str, value: Callable[[], float], *, counter: bool) -> None:
        """Adds a number that is read when the metrics are."""
        self.registry.register(_Value(name, text, value, counter))

    def add_model(self, model: Callable[[], Model]) -> None:
        """Adds the metrics of the version that a function returns."""
        self.registry.register(_ModelCollector(model))

    def text(self) -> bytes:
        """Returns all metrics in Prometheus's text format."""
        return generate_latest(self.registry)


class _Value(Collector):
    """A number that is computed when it is read."""

    def __init__(self, name: str, text: str, value: Callable[[], float], is_counter: bool):
        self._name, self._text, self._value = name, text, value
        self._kind = CounterMetricFamily if is_counter else GaugeMetricFamily

    def collect(self) -> Iterator[Metric]:
        """Yields the metric."""
        yield self._kind(self._name, self._text, value=self._value())


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
    labels = ["model", "version", "checkpoint"]
    family = GaugeMetricFamily("jaxrank_model_info", "The loaded version.", labels=labels)
    checkpoint = str(model.scorer.signature.origin.get("checkpoint", ""))
    family.add_metric([model.name, model.version, checkpoint], 1)
    return family


def _scores(model: Model) -> Iterator[Metric]:
    labels = ["version", "output"]
    count = CounterMetricFamily("jaxrank_scores", "Scored candidates.", labels=labels)
    total = CounterMetricFamily("jaxrank_score_sum", "Sum of the scores.", labels=labels)
    for output, statistics in model.statistics().items():
        count.add_metric([model.version, output], statistics.candidates)
        total.add_metric([model.version, output], statistics.sum)
    yield from (count, total)


def _data(model: Model) -> Iterator[Metric]:
    """Yields statistics of the data that the model was evaluated with."""
    labels = ["version", "output"]
    scores = GaugeMetricFamily(
        "jaxrank_data_score_mean", "Mean score of the validation data.", labels=labels
    )
    observed = GaugeMetricFamily(
        "jaxrank_data_label_mean", "Mean label of the validation data.", labels=labels
    )
    shares = GaugeMetricFamily(
        "jaxrank_data_feature_share",
        "Fraction of a feature's values in the validation data that are missing or unknown.",
        labels=["version", "feature", "state"],
    )
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
    values = CounterMetricFamily(
        "jaxrank_feature_values", "Values of a feature.", labels=["version", "feature"]
    )
    states = CounterMetricFamily(
        "jaxrank_feature_states",
        "Values of a feature that are missing, unknown, out of range or truncated.",
        labels=["version", "feature", "state"],
    )
    shares = GaugeMetricFamily(
        "jaxrank_feature_share",
        "Fraction of a feature's values that are missing or unknown since loading.",
        labels=["version", "feature", "state"],
    )
    for feature, counts in model.scorer.counts().items():
        values.add_metric([model.version, feature], counts.values)
        for state in ("missing", "unknown", "out_of_range", "truncated"):
            number = getattr(counts, state)
            states.add_metric([model.version, feature, state], number)
            if state in ("missing", "unknown") and counts.values:
                shares.add_metric([model.version, feature, state], number / counts.values)
    yield from (values, states, shares)
