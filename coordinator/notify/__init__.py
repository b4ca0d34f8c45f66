"""Long polling, wakeups between processes, and server-sent events. Imports `db`."""
