"""Import of modules on first use."""

import gc
import importlib
import os
import signal
import sys
import threading
from typing import Any

frozen = False
"""True in a program of Tessera: the garbage collector passes over its imports, which would take 0.3 s each time where
torch is among them. In a notebook, it would pass over objects of the person too."""


def _end(number: int, _frame: object) -> None:
    """End this process by a signal."""
    os.write(2, b"stopped\n")
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


def load(module: str) -> Any:
    """Import a module with the garbage collector off, which saves a tenth of the time or more.

    An interrupt meanwhile ends the process as it ends any program, with a line in place of an import's traceback.
    """
    enabled, known, handler = gc.isenabled(), module in sys.modules, signal.getsignal(signal.SIGINT)
    ends = handler is signal.default_int_handler and threading.current_thread() is threading.main_thread()
    gc.disable()
    if ends:
        signal.signal(signal.SIGINT, _end)
    try:
        return importlib.import_module(module)
    finally:
        if ends:
            signal.signal(signal.SIGINT, handler)
        if enabled:
            if frozen and not known:
                gc.freeze()
            gc.enable()


class DeferredModule:
    """A module that is imported when a name is first taken from it.

    A command declares itself without torch, which takes seconds to import and 400 MB.
    """

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(load(self._module), name)
