"""A FLARE client that sends back all that it was sent, moved a little."""

from __future__ import annotations

import numpy as np
import nvflare.client as flare
import torch

STEP = np.float32(1.4e-4)
CHUNK = 1 << 18


def main() -> None:
    flare.init()
    while flare.is_running():
        received = flare.receive()
        if received is None:
            break
        steps = torch.from_numpy(np.random.default_rng().standard_normal(CHUNK, dtype=np.float32) * STEP)
        params = {}
        for name, value in received.params.items():
            flat = torch.as_tensor(value).clone().reshape(-1)
            for start in range(0, flat.numel(), CHUNK):
                part = flat[start : start + CHUNK]
                part += steps[: part.numel()]
            params[name] = flat.reshape(value.shape)
        flare.send(flare.FLModel(params=params, params_type="FULL", meta={"NUM_STEPS_CURRENT_ROUND": 8}))


if __name__ == "__main__":
    main()
