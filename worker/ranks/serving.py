"""The life of a rank, from joining its group until there are no more tasks."""

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tessera.shared.telemetry import logging
from tessera.worker.ranks import handover
from tessera.worker.ranks.messages import START_FILE, STORE_FILE, Start, TaskAt, connect, receive, send
from tessera.worker.ranks.processes import end_with_parent
from tessera.worker.ranks.rank import Rank

LOOPBACK = "lo"
"""The name of Linux's loopback interface."""


def serve(folder: Path, launcher: int, rank: int) -> None:
    """Join the group as this rank, and execute tasks until the agent ends, or hands over none for a while."""
    end_with_parent(launcher, signal.SIGKILL)
    logging.configure(sys.stdout, console=False)
    start: Start = handover.read(folder / START_FILE)
    device, ranks = start.devices[rank], len(start.devices)
    torch.set_num_threads(start.threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # All ranks are on this machine. Otherwise gloo would listen where the machine's name leads.
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = LOOPBACK
    # What the ranks agree on is on the CPU, so that no rank waits for its GPU.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=start.timeout_seconds)
    # Ranks find each other by a file, since a store of torch's on a port has no password.
    store = dist.FileStore(str(folder / STORE_FILE), ranks)  # type: ignore[attr-defined]  # torch does not declare it
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)
    with connect(folder) as connection:
        send(connection, rank)
        executor = Rank(folder, device, connection)
        try:
            while connection.poll(start.idle_seconds):
                # A request to stop may come when the task has ended already.
                if isinstance(message := receive(connection), TaskAt):
                    send(connection, executor.execute(message.path))
        except (EOFError, OSError):
            # The agent ended, or gave up this group.
            pass
    dist.destroy_process_group()
