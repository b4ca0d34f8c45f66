"""What FLARE's server holds: a module whose parameters are the arrays of a file, and a note of each round's time."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import torch
from nvflare.apis.fl_component import FLComponent
from nvflare.app_common.app_event_type import AppEventType


class Drifting(torch.nn.Module):
    def __init__(self, weights: str) -> None:
        super().__init__()
        self.weights = weights
        with np.load(weights) as file:
            for index, name in enumerate(file.files):
                self.register_parameter(f"block{index}", torch.nn.Parameter(torch.from_numpy(file[name])))


class Times(FLComponent):
    """Writes down the seconds from each round's start until its model is saved."""

    def __init__(self, times: str) -> None:
        super().__init__()
        self.times = times
        self.began = 0.0

    def handle_event(self, event_type, fl_ctx):
        if event_type == AppEventType.ROUND_STARTED:
            self.began = time.time()
        elif event_type == AppEventType.AFTER_LEARNABLE_PERSIST:
            with Path(self.times).open("a") as file:
                file.write(json.dumps({"seconds": time.time() - self.began}) + "\n")
