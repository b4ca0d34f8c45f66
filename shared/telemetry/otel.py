"""OpenTelemetry's SDK, sending spans as OTLP over HTTP. Its own environment variables configure it."""

from opentelemetry import context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import SpanContext

from tessera.shared.telemetry.trace_ids import OWN_IDS
from tessera.shared.version import VERSION

NAMELESS = "unknown_service"


class Ids(RandomIdGenerator):
    """Random ids, or those that the present context names as the span's own."""

    def generate_trace_id(self) -> int:
        own = context.get_value(OWN_IDS)
        return own.trace_id if isinstance(own, SpanContext) else super().generate_trace_id()

    def generate_span_id(self) -> int:
        own = context.get_value(OWN_IDS)
        return own.span_id if isinstance(own, SpanContext) else super().generate_span_id()


def provider(service: str) -> TracerProvider:
    """Return the provider that makes spans and sends them. `service` is the process's name if the environment gives
    none."""
    resource = Resource.create()
    if str(resource.attributes[SERVICE_NAME]).startswith(NAMELESS):
        resource = resource.merge(Resource({SERVICE_NAME: service}))
    resource = Resource({SERVICE_VERSION: VERSION}).merge(resource)
    # The last spans are sent by `spans.end`, which waits a limited time.
    made = TracerProvider(resource=resource, id_generator=Ids(), shutdown_on_exit=False)
    made.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return made
