"""A Flower app whose clients send back all that they were sent, moved a little. Runs in Flower's environment.

FedAvg as it comes. Each round's seconds, from the first message that is made to the sum, are written to a file.
"""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

STEP = np.float32(1.4e-4)
CHUNK = 1 << 18

client = ClientApp()
server = ServerApp()


@client.train()
def train(message: Message, context: Context) -> Message:
    steps = np.random.default_rng(random.getrandbits(32)).standard_normal(CHUNK, dtype=np.float32) * STEP
    arrays = []
    for values in message.content["arrays"].to_numpy_ndarrays():
        flat = np.array(values).reshape(-1)
        for start in range(0, flat.size, CHUNK):
            part = flat[start : start + CHUNK]
            part += steps[: part.size]
        arrays.append(flat.reshape(values.shape))
    reply = {"arrays": ArrayRecord(arrays), "metrics": MetricRecord({"num-examples": 8})}
    return Message(RecordDict(reply), reply_to=message)


class Timed(FedAvg):
    def __init__(self, times: Path, workers: int) -> None:
        super().__init__(
            fraction_evaluate=0.0, min_train_nodes=workers, min_available_nodes=workers, min_evaluate_nodes=0
        )
        self.times = times

    def configure_train(self, *given, **named):
        self.began = time.time()
        return super().configure_train(*given, **named)

    def aggregate_train(self, server_round, replies):
        kept = list(replies)
        found = super().aggregate_train(server_round, kept)
        with self.times.open("a") as file:
            line = {"round": server_round, "seconds": time.time() - self.began, "replies": len(kept)}
            file.write(json.dumps(line) + "\n")
        return found


@server.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    with np.load(str(config["weights"])) as file:
        arrays = ArrayRecord([file[name] for name in file.files])
    workers = int(config["workers"])
    while len(list(grid.get_node_ids())) < workers:
        time.sleep(0.1)
    strategy = Timed(Path(str(config["times"])), workers)
    strategy.start(grid=grid, initial_arrays=arrays, num_rounds=int(config["rounds"]))
