"""The processes in which virtual workers do their tasks: this one, or several that it forks.

A forked process does tasks as this process would, and returns the updates that its coordinator accepted. The files
are the same, so that a task may follow another of its site in another process. Messages are JSON; blobs
follow as they are.
"""

from __future__ import annotations

import os
import signal
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Self

import torch

from tessera.shared.api.runs import Measurement, Round
from tessera.shared.api.tasks import TaskView
from tessera.shared.schema import Message
from tessera.worker.executor.supervisor import end_with_parent
from tessera.worker.simulation.in_process_coordinator import HandedOver, Order
from tessera.worker.simulation.virtual_workers import Workers

AHEAD = 2
"""Number of tasks that a process has at a time, so that it need not wait for the next."""
AHEAD_BLOCKS = 256
"""Number of a model's blocks up to which a request fits into a pipe, while its reader waits to write an answer."""


class WorkerProcessFailed(RuntimeError):
    """A process of the simulation ended, or code of a method failed in it. The message has its traceback."""


class ProcessRequest(Message):
    """A task for a process, or the end of an attempt at a round."""

    order: Order | None = None
    held: tuple[str, ...] = ()
    """The blobs that the order's worker holds."""
    cohort: int = 1
    ended: Round | None = None


class ProcessAnswer(Message):
    """The outcome of a task. `accepted` is followed by the bytes of the update and of its blocks."""

    view: TaskView | None = None
    measurement: Measurement | None = None
    accepted: HandedOver | None = None
    held: tuple[str, ...] = ()
    fault: str | None = None


@dataclass
class _Process:
    """A forked process, and its tasks in the order in which it answers them."""

    process: BaseProcess
    connection: Connection
    orders: deque[Order] = field(default_factory=deque)


class WorkerProcesses:
    """The processes of a simulation. They are forked for the first task, and end with this one."""

    def __init__(self, workers: Workers, count: int) -> None:
        self._workers = workers
        self._count = count
        self._processes: list[_Process] = []

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

    def train(self, orders: Sequence[Order]) -> dict[str, TaskView]:
        """Run training tasks, but for those that were accepted before the process was last killed.

        Return each one's outcome, by its id. Raises WorkerProcessFailed, and the exceptions of methods.
        """
        coordinator = self._workers.coordinator
        views = {order.id: view for order in orders if (view := coordinator.answered(order))}
        left = [order for order in orders if order.id not in views]
        if self._count == 1:
            return views | {order.id: self._workers.train(order) for order in left}
        for order, answer in self._answers(left):
            if answer.view:
                views[order.id] = answer.view
        return views

    def evaluate(self, orders: Sequence[Order]) -> list[Measurement | TaskView]:
        """Run evaluation tasks. Return each one's measurement, or the failed task, in the sequence of `orders`.

        Raises as `train` does.
        """
        if self._count == 1:
            return [self._workers.evaluate(order) for order in orders]
        found = {order.id: answer.measurement or answer.view for order, answer in self._answers(orders)}
        return [outcome for order in orders if (outcome := found[order.id])]

    def end(self, made: Round) -> None:
        """Record the outcome of the accepted updates of a finished attempt, in all processes."""
        self._workers.coordinator.end(made)
        request = ProcessRequest(ended=made).model_dump_json().encode() if self._processes else b""
        for each in self._processes:
            each.connection.send_bytes(request)

    def _answers(self, orders: Sequence[Order]) -> Iterator[tuple[Order, ProcessAnswer]]:
        """Give the orders to the processes, and yield each with its answer."""
        while orders and len(self._processes) < self._count:
            self._processes.append(self._forked())
        left = deque(orders)
        ahead = AHEAD if self._workers.coordinator.blocks <= AHEAD_BLOCKS else 1
        for each in self._processes * ahead:
            self._give(each, left)
        while busy := {each.connection: each for each in self._processes if each.orders}:
            for connection in wait(list(busy)):
                each = busy[connection]  # type: ignore[index]  # only connections are waited for
                answer = self._answer(each)
                order = each.orders.popleft()
                self._give(each, left)
                yield order, answer

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

    def _give(self, each: _Process, left: deque[Order]) -> None:
        if left:
            order, coordinator = left.popleft(), self._workers.coordinator
            held = tuple(coordinator.held.get(order.holder, ()))
            request = ProcessRequest(order=order, held=held, cohort=coordinator.cohort)
            each.connection.send_bytes(request.model_dump_json(exclude_defaults=True).encode())
            each.orders.append(order)

    def _answer(self, each: _Process) -> ProcessAnswer:
        """Receive the answer to a process's first order, and the update that its coordinator accepted."""
        coordinator, order = self._workers.coordinator, each.orders[0]
        try:
            answer = ProcessAnswer.model_validate_json(each.connection.recv_bytes())
            if answer.accepted:
                data, blocks = each.connection.recv_bytes(), each.connection.recv_bytes()
                coordinator.take_over(order, answer.accepted, data, blocks)
        except (EOFError, OSError) as fault:
            each.process.join()
            raise WorkerProcessFailed(
                f"a process of the simulation ended in task {order.id} with exit code {each.process.exitcode}; "
                "repeat the command to resume, with fewer processes if the memory was too small"
            ) from fault
        if answer.fault:
            raise WorkerProcessFailed(f"task {order.id} of {order.worker} failed in its process:\n{answer.fault}")
        coordinator.held[order.holder] = frozenset(answer.held)
        return answer


def _serve(connection: Connection, copies: Sequence[Connection], workers: Workers, parent: int) -> None:
    """Do the tasks that arrive, until the other end is closed. `copies` are the parent's ends."""
    end_with_parent(parent, signal.SIGKILL)
    for copy in copies:
        copy.close()
    # The parent is interrupted too, and ends its processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    coordinator = workers.coordinator
    coordinator.serve_alone()
    refusal = _autograd_refusal()
    while True:
        try:
            request = ProcessRequest.model_validate_json(connection.recv_bytes())
        except EOFError:
            return
        if request.ended:
            coordinator.end(request.ended)
        if request.order is None:
            continue
        coordinator.cohort = request.cohort
        coordinator.held[request.order.holder] = frozenset(request.held)
        parts: tuple[bytes, ...] = ()
        try:
            answer = ProcessAnswer(fault=refusal) if refusal else _done(workers, request.order)
            if accepted := coordinator.hand_over(request.order):
                answer = answer.model_copy(update={"accepted": accepted[0]})
                parts = accepted[1:]
        except Exception:  # noqa: BLE001  (of a method's code: the parent raises it)
            answer = ProcessAnswer(fault=traceback.format_exc())
        connection.send_bytes(answer.model_dump_json(exclude_defaults=True).encode())
        for part in parts:
            connection.send_bytes(part)


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


def _done(workers: Workers, order: Order) -> ProcessAnswer:
    outcome = workers.train(order) if order.kind == "train" else workers.evaluate(order)
    held = tuple(workers.coordinator.held.get(order.holder, ()))
    if isinstance(outcome, TaskView):
        return ProcessAnswer(view=outcome, held=held)
    return ProcessAnswer(measurement=outcome, held=held)
