"""Log lines, trace ids and OpenTelemetry spans, alike in every process. Imports no other package of `shared`."""
