"""The processes in which virtual workers do their tasks: this one, or several that it forks.

A forked process does tasks as this process would, and returns their reports. The files are the same, so that a task
may follow another of its site in another process. Messages are JSON; the bytes of a small update follow as they are.
"""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Self

import torch

from tessera.shared.schema import Message
from tessera.simulation.virtual_workers import Work, Workers, WorkResult
from tessera.worker.executor.supervisor import end_with_parent

AHEAD = 2
"""Number of tasks that a process has at a time, so that it need not wait for the next."""

PIPE_BYTES = 1 << 15
"""A request up to this size fits into a pipe, while its reader waits to write an answer."""


class WorkerProcessFailed(RuntimeError):
    """A process of the simulation ended, or code of a method failed in it. The message has its traceback."""


class ProcessAnswer(Message):
    """The result of a task. The bytes of an update in the submission follow."""

    result: WorkResult | None = None
    data_follow: bool = False
    fault: str | None = None


@dataclass
class _Process:
    """A forked process, and its tasks in the order in which it answers them."""

    process: BaseProcess
    connection: Connection
    works: list[Work] = field(default_factory=list)


class WorkerProcesses:
    """The processes of a simulation. They are forked for the first task, and end with this one."""

    def __init__(self, workers: Workers, count: int) -> None:
        self._workers = workers
        self._count = count
        self._processes: list[_Process] = []
        self._results: dict[str, WorkResult] = {}
        self._forgotten: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, at: TracebackType | None
    ) -> None:
        for each in self._processes:
            each.connection.close()
            if kind:
                each.process.kill()
        for each in self._processes:
            each.process.join()
        self._processes.clear()

    @property
    def ahead(self) -> int:
        """The number of tasks to begin before the result of the first of them is needed."""
        return self._count * AHEAD if self._count > 1 else 1

    def begin(self, work: Work) -> None:
        """Begin a task beside others, once an earlier task of the same worker has ended."""
        if self._count == 1:
            self._results[work.task.id] = self._workers.do(work)
            return
        while len(self._processes) < self._count:
            self._processes.append(self._forked())
        while any(other.home == work.home for each in self._processes for other in each.works):
            self._receive()
        while len(first := min((each.works for each in self._processes), key=len)) >= AHEAD:
            self._receive()
        each = next(each for each in self._processes if each.works is first)
        request = work.model_dump_json(exclude_defaults=True).encode()
        while len(request) > PIPE_BYTES and each.works:
            self._receive()
        each.connection.send_bytes(request)
        each.works.append(work)

    def result(self, task: str) -> WorkResult:
        """Remove and return the result of a task that was begun. Raises WorkerProcessFailed, and the exceptions of
        methods."""
        while task not in self._results:
            self._receive()
        return self._results.pop(task)

    def forget(self, task: str) -> None:
        """Remove the result of a task that was cancelled, now or when it is there."""
        self._forgotten.add(task)
        self._results.pop(task, None)

    def _receive(self) -> None:
        """Receive the results that are ready, and wait for one at least."""
        busy = {each.connection: each for each in self._processes if each.works}
        for connection in wait(list(busy)):
            each = busy[connection]  # type: ignore[index]  # only connections are waited for
            work = each.works[0]
            result = self._answer(each, work)
            del each.works[0]
            if work.task.id not in self._forgotten:
                self._results[work.task.id] = result

    def _forked(self) -> _Process:
        # Sites' data may be functions, which only a fork hands over.
        context = get_context("fork")
        ours, theirs = context.Pipe()
        # The fork has copies of our ends, of which none may stay open when we close ours.
        copies = [ours, *(each.connection for each in self._processes)]
        arguments = (theirs, copies, self._workers, os.getpid())
        process = context.Process(target=_serve, args=arguments, name="simulation")
        process.start()
        theirs.close()
        return _Process(process, ours)

    def _answer(self, each: _Process, work: Work) -> WorkResult:
        try:
            answer = ProcessAnswer.model_validate_json(each.connection.recv_bytes())
            data = each.connection.recv_bytes() if answer.data_follow else None
        except (EOFError, OSError) as fault:
            each.process.join()
            raise WorkerProcessFailed(
                f"a process of the simulation ended in task {work.name} with exit code {each.process.exitcode}; "
                "repeat the command to resume, with fewer processes if the memory was too small"
            ) from fault
        if answer.fault or answer.result is None:
            raise WorkerProcessFailed(f"task {work.name} of {work.worker} failed in its process:\n{answer.fault}")
        return _with_data(answer.result, data)


def _with_data(result: WorkResult, data: bytes | None) -> WorkResult:
    if result.submission is None:
        return result
    return result.model_copy(update={"submission": result.submission.model_copy(update={"data": data})})


def _serve(connection: Connection, copies: Sequence[Connection], workers: Workers, parent: int) -> None:
    """Do the tasks that arrive, until the other end is closed. `copies` are the parent's ends."""
    end_with_parent(parent, signal.SIGKILL)
    for copy in copies:
        copy.close()
    # The parent is interrupted too, and ends its processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    refusal = _autograd_refusal()
    while True:
        try:
            work = Work.model_validate_json(connection.recv_bytes())
        except EOFError:
            return
        data = None
        try:
            answer = ProcessAnswer(fault=refusal)
            if not refusal:
                result = workers.do(work)
                data = result.submission.data if result.submission else None
                answer = ProcessAnswer(result=_with_data(result, None), data_follow=data is not None)
        except Exception:  # noqa: BLE001  (of a method's code: the parent raises it)
            answer = ProcessAnswer(fault=traceback.format_exc())
        connection.send_bytes(answer.model_dump_json(exclude_defaults=True).encode())
        if data is not None:
            connection.send_bytes(data)


def _autograd_refusal() -> str | None:
    """Return the reason why this fork cannot train; None if it can.

    Where there is a GPU, a first backward pass starts threads, also on the CPU, and a fork does not have them.
    """
    try:
        torch.ones((), requires_grad=True).backward()  # type: ignore[no-untyped-call]
    except RuntimeError as fault:
        return (
            f"torch has trained in this process before, and its forks cannot train where there is a GPU ({fault}): "
            "simulate in a new process, hide the GPU (CUDA_VISIBLE_DEVICES=), or set processes = 1"
        )
    return None
