"""Flower's simulation engine at the work of `benchmarks.simulations`. Runs in Flower's environment.

    python simulated.py SETTINGS.json

Each client trains a model of transformers on one batch, over and over, and returns all weights: FedAvg as it comes.
A client process keeps its model and its data between clients, which is the best case. Each round's end is written to
a file.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from functools import cache
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForImageClassification

SETTINGS = json.loads(Path(os.environ.get("SIMULATED_SETTINGS") or sys.argv[1]).read_text(encoding="utf-8"))

client = ClientApp()
server = ServerApp()


@cache
def model() -> torch.nn.Module:
    torch.set_num_threads(1)
    return AutoModelForImageClassification.from_config(AutoConfig.for_model(**SETTINGS["config"]))


@cache
def batch(number: int) -> dict[str, torch.Tensor]:
    dice, config = torch.Generator().manual_seed(number), SETTINGS["config"]
    side, rows = config["image_size"], SETTINGS["batch"]
    pixels = torch.randn(rows, config["num_channels"], side, side, generator=dice)
    return {"pixel_values": pixels, "labels": torch.randint(0, config["num_labels"], (rows,), generator=dice)}


@client.train()
def train(message: Message, context: Context) -> Message:
    net = model()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    net.train()
    data = batch(int(context.node_config["partition-id"]))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    for _ in range(SETTINGS["steps"]):
        optimizer.zero_grad()
        loss = net(**data).loss
        loss.backward()
        optimizer.step()
    metrics = MetricRecord({"num-examples": SETTINGS["batch"], "loss": float(loss.detach())})
    reply = {"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}
    return Message(RecordDict(reply), reply_to=message)


class Timed(FedAvg):
    def configure_train(self, server_round, arrays, config, grid):  # type: ignore[no-untyped-def]
        return super().configure_train(server_round, arrays, config or ConfigRecord(), grid)

    def aggregate_train(self, server_round, replies):  # type: ignore[no-untyped-def]
        kept = list(replies)
        found = super().aggregate_train(server_round, kept)
        with Path(SETTINGS["times"]).open("a", encoding="ascii") as file:
            answered = sum(reply.has_content() for reply in kept)
            file.write(json.dumps({"round": server_round, "at": time.time(), "clients": answered}) + "\n")
        return found


@server.main()
def main(grid: Grid, context: Context) -> None:
    sites = SETTINGS["sites"]
    strategy = Timed(fraction_evaluate=0.0, min_train_nodes=sites, min_available_nodes=sites, min_evaluate_nodes=0)
    arrays = ArrayRecord(load_file(SETTINGS["weights"]))
    strategy.start(grid=grid, initial_arrays=arrays, num_rounds=SETTINGS["rounds"])


if __name__ == "__main__":
    os.environ["SIMULATED_SETTINGS"] = str(Path(sys.argv[1]).resolve())
    # Client processes import the app: of a main module, cached functions cannot be sent to them.
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    from simulated import client as client_app
    from simulated import server as server_app

    logging.getLogger("flwr").setLevel(logging.WARNING)
    resources = {"num_cpus": 1, "num_gpus": 0.0}
    init = {"num_cpus": SETTINGS["processes"], "include_dashboard": False, "logging_level": "error"}
    backend = {"client_resources": resources, "init_args": init}
    run_simulation(server_app, client_app, num_supernodes=SETTINGS["sites"], backend_config=backend)
