"""The life of a rank, from joining its group until there are no more tasks."""

import os
import signal
import socket
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tessera.shared.telemetry import logging
from tessera.worker.ranks import handover
from tessera.worker.ranks.messages import START_FILE, Start, TaskAt, connect
from tessera.worker.ranks.processes import end_with_parent
from tessera.worker.ranks.rank import Rank

LOOPBACK = "lo"
"""The name of Linux's loopback interface."""


def serve(folder: Path, launcher: int) -> None:
    """Execute tasks until the agent ends, or hands over none for a while."""
    end_with_parent(launcher, signal.SIGKILL)
    logging.configure(sys.stdout, console=False)
    start: Start = handover.read(folder / START_FILE)
    device = start.devices[int(os.environ["RANK"])]
    torch.set_num_threads(start.threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if LOOPBACK in {name for _, name in socket.if_nameindex()}:
        # All ranks are on this machine, and gloo would listen where the machine's name leads.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    # What the ranks agree on is on the CPU, so that no rank waits for its GPU.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=start.timeout_seconds))
    with connect(folder) as connection:
        connection.send(dist.get_rank())
        rank = Rank(folder, device, connection)
        try:
            while connection.poll(start.idle_seconds):
                # A request to stop may come when the task has ended already.
                if isinstance(message := connection.recv(), TaskAt):
                    connection.send(rank.execute(message.path))
        except (EOFError, OSError):
            # The agent ended, or gave up this group.
            pass
    dist.destroy_process_group()
