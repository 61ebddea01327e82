"""Join the metrics of all models' servers, each sample with the name of its model, and add those of the models."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

import httpx
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from starlette.responses import Response

from tokenmill.serving.models.catalogue import Catalogue
from tokenmill.serving.models.service import ModelService
from tokenmill.serving.models.states import SERVING, ModelState
from tokenmill.serving.observe.metrics import PREFIX

_SCRAPE_SECONDS = 5.0
LABEL = "model"


async def scraped(service: ModelService, seen: Catalogue, lines: Collector | None = None) -> Response:
    """Return the metrics of the loaded ones of these models, and of models as such; a mute server is left out.

    `lines`: counts the lines of batches, where there are any.
    """
    names = [name for name in service.servers if name in seen and service.record(name).state in SERVING]
    texts = await asyncio.gather(*(_text(service, name) for name in names))
    registry = CollectorRegistry()
    registry.register(_Fixed([*_own(service, seen), *merged(zip(names, texts, strict=True))]))
    if lines is not None:
        registry.register(lines)
    return Response(generate_latest(registry), headers={"content-type": CONTENT_TYPE_LATEST})


def merged(texts: Iterable[tuple[str, str]]) -> list[Metric]:
    """Return the metrics of several texts; each sample has the name that came with its text as a label."""
    found: dict[str, Metric] = {}
    for name, text in texts:
        for metric in text_string_to_metric_families(text):
            family = found.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
            family.samples += [sample._replace(labels={LABEL: name} | sample.labels) for sample in metric.samples]
    return list(found.values())


async def _text(service: ModelService, name: str) -> str:
    server = service.servers.get(name)
    if server is None:
        return ""
    keys = service.catalogue[name].keys
    headers = {"authorization": f"Bearer {keys[0]}"} if keys else {}
    try:
        reply = await server.http.get("/metrics", timeout=_SCRAPE_SECONDS, headers=headers)
    except httpx.HTTPError:
        return ""
    return reply.text if reply.status_code == httpx.codes.OK else ""


def _own(service: ModelService, seen: Catalogue) -> Iterator[Metric]:
    """Yield the metrics of the models as such."""
    states = GaugeMetricFamily(f"{PREFIX}:model_state", "1 for the state of each model", labels=[LABEL, "state"])
    memory = GaugeMetricFamily(f"{PREFIX}:model_memory_bytes", "Bytes that a model takes when loaded", labels=[LABEL])
    waiting = GaugeMetricFamily(f"{PREFIX}:model_requests_waiting", "Requests that wait for a model", labels=[LABEL])
    loads = CounterMetricFamily(f"{PREFIX}:model_loads", "How often a model was loaded", labels=[LABEL])
    wakes = CounterMetricFamily(f"{PREFIX}:model_wakes", "How often a sleeping model was woken up", labels=[LABEL])
    deaths = CounterMetricFamily(f"{PREFIX}:model_deaths", "How often a model's server died", labels=[LABEL])
    for name, record in [(entry.name, service.record(entry.name)) for entry in seen]:
        for state in ModelState:
            states.add_metric([name, state.value], float(record.state is state))
        memory.add_metric([name], record.rules.num_bytes)
        waiting.add_metric([name], len(record.waiting))
        loads.add_metric([name], service.loads[name])
        wakes.add_metric([name], service.wakes[name])
        deaths.add_metric([name], service.deaths[name])
    taken = sum(record.num_bytes for record in service.keeper.models.values())
    budget = GaugeMetricFamily(f"{PREFIX}:models_memory_bytes", "Memory of all models", labels=["part"])
    budget.add_metric(["taken"], taken)
    budget.add_metric(["budget"], service.keeper.budget)
    yield from (states, memory, waiting, loads, wakes, deaths, budget)


class _Fixed(Collector):
    """A collector of metrics that are there already."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """Yield them."""
        yield from self._metrics
