"""Processes that run a study's jobs, each of which may decide what comes next."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from itertools import islice
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import Any, Protocol, TypeVar

import structlog
import torch

METHODS = Path(__file__).parents[1] / "controls"


class Named(Protocol):
    """A job."""

    @property
    def name(self) -> str: ...


J = TypeVar("J", bound=Named)
Figures = dict[str, Any]


def begin() -> None:
    """Prepare a process for runs: the benchmarks' own methods, one thread, and a log of warnings alone."""
    os.environ["TESSERA_METHODS"] = str(METHODS)
    # Else a GPU's products may differ from run to run. CUDA reads it when it starts.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    torch.set_num_threads(1)
    if (parent := parent_process()) is not None:
        Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: Any) -> None:
    # A killed parent leaves its processes to compute on, for no one, beside those of the command that resumes.
    parent.join()
    os._exit(1)


def work(
    wanted: Callable[[Collection[J]], Iterable[J]],
    task: Callable[[J], tuple[Any, ...]],
    keep: Callable[[J, Figures], None],
    processes: int,
    over: Callable[[], bool] = lambda: False,
) -> dict[J, str]:
    """Run the jobs that are `wanted`, in this order, several at the same time, until `over` says to start no more.

    `wanted` receives the jobs that run or have failed, and leaves them out. `task` returns a function and its
    arguments, which travel to a process. `keep` receives the figures of each job that ends. Return the reason of each
    job that failed; the others go on.
    """
    running: dict[Future[Figures], J] = {}
    failed: dict[J, str] = {}
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=begin) as pool:
        while True:
            free = 0 if over() else processes - len(running)
            for job in list(islice(wanted({*running.values(), *failed}), free)):
                running[pool.submit(*task(job))] = job
            if not running:
                return failed
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job = running.pop(future)
                try:
                    figures = future.result()
                except Exception as fault:  # noqa: BLE001  (one failed run must not end the others)
                    failed[job] = f"{type(fault).__name__}: {fault}"
                    print(f"{job.name}: {failed[job]}", file=sys.stderr, flush=True)
                    continue
                keep(job, figures)
