"""Publish the traces of a job's store, over OTLP. Part of the worker: needs mlflow.

MLflow has no public function that stores a trace that has ended, but its server takes spans at
`POST /v1/traces` (OpenTelemetry's protocol; tried with MLflow 3.17). It stores a span under its own
ids, so a trace that is sent again is the same trace.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from mlflow.entities import Span
from mlflow.exceptions import MlflowException
from mlflow.utils.credentials import get_default_host_creds
from mlflow.utils.rest_utils import http_request

from ..common.humanize import humanize_count
from .published import Replay
from .recorded import RecordedStore, read_texts
from .requests import unless_refused

_PATH: Final = "/v1/traces"
_LONGEST: Final = 32 << 20
"""The largest trace, in bytes."""
_REFUSALS: Final = {*range(400, 500), 501} - {408, 425, 429}
_SEMANTIC: Final = {"mlflow.trace.session": "session.id", "mlflow.trace.user": "user.id"}
"""OpenTelemetry's attributes of a root span, by MLflow's metadata that its server makes of them."""


def publish_traces(
    at: Replay, source: RecordedStore, experiment: Callable[[str, str], str]
) -> None:
    """Publish all finished traces, each to its run, and report how many are left out, and why.

    `experiment` returns MLflow's id of an experiment, by its id in the store and its name.
    """
    left: Counter[str] = Counter()
    for source_id, name in source.experiments.items():
        for directory in sorted((at.store / source_id / "traces").glob("*/")):
            if directory.name in at.published.over:
                continue
            why: list[str] = []
            into = unless_refused(partial(experiment, source_id, name), why.append)
            if into is not None:
                _publish(at, directory, into, why.append)
            left.update(why[:1])
            at.published.over.add(directory.name)
    for reason, number in left.items():
        at.notify(f"{humanize_count(number, 'trace is', 'traces are')} left out: {reason}")


def _publish(at: Replay, directory: Path, experiment: str, refuse: Callable[[str], None]) -> None:
    if not at.client.tracking_uri.startswith(("http://", "https://")):
        refuse("only a tracking server takes them, at an address with http:// or https://")
        return
    metadata = read_texts(directory / "request_metadata")
    try:
        content = _encode(directory / "artifacts" / "traces.json", metadata)
    except ImportError:
        refuse("this machine's MLflow is too old to send them; install 3.17 or later")
        return
    except Exception:  # noqa: BLE001 - a job may have written anything
        refuse("the job has not finished them, or they are damaged")
        return
    answer = http_request(
        get_default_host_creds(at.client.tracking_uri), _PATH, "POST", data=content,
        extra_headers={
            "Content-Type": "application/x-protobuf", "x-mlflow-experiment-id": experiment,
        },
    )  # fmt: skip
    if (code := answer.status_code) in _REFUSALS:
        # The same credentials did for all that was published before.
        refuse(f"the tracking server refused them with {code} ({_PATH} needs a recent MLflow)")
        return
    if not answer.ok:
        raise MlflowException(f"{_PATH} answered with {code}")
    client, trace = at.client, directory.name
    run = at.published.runs.get(metadata.get("mlflow.sourceRun", ""), at.run_id)
    # Its header x-mlflow-run-id is unknown to older servers (3.12).
    unless_refused(partial(client.link_traces_to_run, [trace], run), at.notify)
    for tag, value in read_texts(directory / "tags").items():
        if tag == "mlflow.traceName" or not tag.startswith("mlflow."):
            unless_refused(partial(client.set_trace_tag, trace, tag, value), at.notify)


def _encode(path: Path, metadata: Mapping[str, str]) -> bytes:
    """Return the spans of a trace as OTLP, in protobuf.

    Raises:
        ImportError: MLflow is older than the protocol.
        Exception: they are damaged, or the trace has not ended.
    """
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    if path.stat().st_size > _LONGEST:
        raise ValueError(path)
    spans = [Span.from_dict(each) for each in json.loads(path.read_bytes())["spans"]]
    if not any(span.parent_id is None and span.end_time_ns for span in spans):
        raise ValueError(path)
    more = {name: metadata[key] for key, name in _SEMANTIC.items() if key in metadata}
    made = [_span(span, {} if span.parent_id else more) for span in spans]
    resource: Any = {"scope_spans": [{"spans": made}]}
    request = ExportTraceServiceRequest(resource_spans=[resource])
    return bytes(request.SerializeToString())


def _span(span: Span, more: Mapping[str, str]) -> dict[str, Any]:
    return {
        **_ids(span.trace_id, span.span_id),
        "parent_span_id": bytes.fromhex(span.parent_id or ""),
        "name": span.name,
        "start_time_unix_nano": span.start_time_ns,
        "end_time_unix_nano": span.end_time_ns or 0,
        "status": {
            "code": {"OK": 1, "ERROR": 2}.get(span.status.status_code.value, 0),
            "message": span.status.description or "",
        },
        "attributes": _pairs({**span.attributes, **more}),
        "events": [
            {"name": event.name, "time_unix_nano": event.timestamp,
             "attributes": _pairs(event.attributes)}
            for event in span.events
        ],
        "links": [
            {**_ids(link.trace_id, link.span_id), "attributes": _pairs(link.attributes or {})}
            for link in getattr(span, "links", ())  # MLflow 3.11 and later
        ],
    }  # fmt: skip


def _ids(trace: str, span: str) -> dict[str, bytes]:
    return {"trace_id": bytes.fromhex(trace.removeprefix("tr-")), "span_id": bytes.fromhex(span)}


def _pairs(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": str(key), "value": _value(value)} for key, value in values.items()]


def _value(value: object) -> dict[str, Any]:
    if isinstance(value, dict):
        return {"kvlist_value": {"values": _pairs(value)}}
    if isinstance(value, list | tuple):
        return {"array_value": {"values": [_value(each) for each in value]}}
    kind = {bool: "bool_value", int: "int_value", float: "double_value"}.get(type(value))
    if kind is None or (isinstance(value, int) and abs(value) >= 1 << 63):
        return {"string_value": str(value)} if value is not None else {}
    return {kind: value}
