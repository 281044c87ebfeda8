"""What a server counts, in Prometheus' text format; of several routers, all of them together.

Every router writes what it has counted to a file of the deployment's directory, once a second and
at its end. Whichever router is asked adds the others' files to its own counts, and a router that
was killed goes on from its file. Touch this when requests are counted in another way.
"""

import asyncio
import contextlib
import math
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import prometheus_client as prometheus
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from slipstream.serving.http.metric_names import METRICS, MetricName, metric_of

BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56)
FILES = "*.metrics"
SHARE_SECONDS = 1.0
Figures = Mapping[tuple[str, ...], float]


class RequestTimes(msgspec.Struct, array_like=True):
    """The times of one kind of request: how many in each bucket, and their sum."""

    counts: list[int] = msgspec.field(default_factory=lambda: [0] * (len(BUCKETS) + 1))
    total: float = 0.0

    def observe(self, seconds: float) -> None:
        """Note one request."""
        self.counts[bisect_left(BUCKETS, seconds)] += 1
        self.total += seconds

    def add(self, other: "RequestTimes") -> None:
        """Add the requests of another one."""
        self.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        self.total += other.total


class Counted(msgspec.Struct):
    """What one process has counted: times by `endpoint hit reason`, answers by `endpoint status`,
    and the figures that are summed over routers.
    """

    times: dict[str, RequestTimes] = msgspec.field(default_factory=dict)
    answers: dict[str, int] = msgspec.field(default_factory=dict)
    figures: dict[str, float] = msgspec.field(default_factory=dict)

    def add(self, other: "Counted") -> None:
        """Add what another process has counted."""
        for key, times in other.times.items():
            self.times.setdefault(key, RequestTimes()).add(times)
        for key, count in other.answers.items():
            self.answers[key] = self.answers.get(key, 0) + count
        for key, value in other.figures.items():
            self.figures[key] = self.figures.get(key, 0.0) + value


class RequestMetrics:
    """Counts and times requests, and shows a server's own figures, for Prometheus."""

    def __init__(
        self,
        read_stats: Callable[[], Figures],
        labels: tuple[str, ...] = (),
        *,
        file: Path | None = None,
    ) -> None:
        """`read_stats` returns (figure, *label values) → number; `file` shares the counts."""
        self._registry = prometheus.CollectorRegistry()
        self._read_stats, self._labels, self._file = read_stats, labels, file
        self._counted = Counted()
        self._before = Counted()  # of an earlier process of the same name
        if file is not None:
            self._before = _read(file) or Counted()
        self._registry.register(self)

    def count(
        self, endpoint: str, status: int, seconds: float, hit: str = "", reason: str = ""
    ) -> None:
        """Note one answer: where its prefix was found, or why it was refused or pre-inferred."""
        key = f"{endpoint} {hit} {reason}"
        times = self._counted.times.get(key)
        if times is None:
            times = self._counted.times[key] = RequestTimes()
        times.observe(seconds)
        answer = f"{endpoint} {status}"
        self._counted.answers[answer] = self._counted.answers.get(answer, 0) + 1

    def share(self) -> None:
        """Write the counts for the other routers; a full disk costs only their view of them."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                beside = self._file.with_suffix(".new")
                beside.write_bytes(msgspec.msgpack.encode(self._own(self._read_stats())))
                beside.replace(self._file)

    def _own(self, figures: Figures) -> Counted:
        """Return all that this router and the one before it have counted."""
        summed = {
            "\t".join(key): value for key, value in figures.items() if metric_of(key[0])[0].summed
        }
        own = Counted(dict(self._counted.times), dict(self._counted.answers), summed)
        counters = {
            key: value
            for key, value in self._before.figures.items()
            if metric_of(key.partition("\t")[0])[0].kind == "counter"
        }
        total = Counted()
        total.add(Counted(self._before.times, self._before.answers, counters))
        total.add(own)
        return total

    def collect(self) -> Iterable[Metric]:
        """Return every metric; the registry calls this at every scrape."""
        figures = dict(self._read_stats())
        total = self._own(figures)
        if self._file is not None:
            for other in self._file.parent.glob(FILES):
                found = _read(other) if other != self._file else None
                if found is not None:
                    total.add(found)
        for key, value in total.figures.items():
            figures[tuple(key.split("\t"))] = value
        yield from self._requests(total)
        yield from self._figures(figures)

    def _requests(self, total: Counted) -> Iterable[Metric]:
        seconds = HistogramMetricFamily(
            "slipstream_request_seconds",
            "Seconds to answer, by endpoint, by where the prefix was found, and by the reason of "
            "a pre-inference or a refusal.",
            labels=("endpoint", "hit", "reason"),
        )
        for key, times in sorted(total.times.items()):
            buckets, reached = [], 0
            for edge, count in zip((*BUCKETS, math.inf), times.counts, strict=True):
                reached += count
                buckets.append(("+Inf" if edge == math.inf else repr(edge), float(reached)))
            seconds.add_metric(key.split(" "), buckets, times.total)
        answers = CounterMetricFamily(
            "slipstream_answers", "Answers by endpoint and status.", labels=("endpoint", "status")
        )
        for key, count in sorted(total.answers.items()):
            answers.add_metric(key.split(" "), float(count))
        return (seconds, answers)

    def _figures(self, figures: Figures) -> Iterable[Metric]:
        families: dict[tuple[str, tuple[str, ...]], Any] = {}
        for (figure, *values), number in figures.items():
            metric, word = metric_of(figure)
            labels = self._labels[: len(values)] + ((metric.label,) if metric.label else ())
            name = metric.name or metric.figure
            if (name, labels) not in families:
                families[name, labels] = _family(metric, name, labels)
            families[name, labels].add_metric([*values, *([word] if metric.label else [])], number)
        return families.values()

    def text(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return prometheus.generate_latest(self._registry)


@contextlib.asynccontextmanager
async def sharing(metrics: RequestMetrics) -> AsyncIterator[None]:
    """Share a router's counts while the block runs, and once more at its end."""

    async def share_forever() -> None:
        while True:
            await asyncio.sleep(SHARE_SECONDS)
            metrics.share()

    task = asyncio.create_task(share_forever())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        metrics.share()


def _family(metric: MetricName, name: str, labels: tuple[str, ...]) -> Metric:
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    return kind(f"slipstream_{name}", metric.help, labels=labels)


def _read(path: Path) -> Counted | None:
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=Counted)
    except (OSError, msgspec.DecodeError):
        return None


def metric_names() -> set[str]:
    """Return the names that a deployment's metrics may have, for the files of deploy/."""
    names = {"slipstream_request_seconds", "slipstream_answers_total"}
    for metric in METRICS:
        name = f"slipstream_{metric.name or metric.figure}"
        names.add(f"{name}_total" if metric.kind == "counter" else name)
    return names
