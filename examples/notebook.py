# %% [markdown]
# # An orchestrator at work
#
# Connect, preview, create, watch, look at figures, export: the Python client from a notebook. Each `# %%` is a cell
# in editors that know the percent format. A coordinator and a worker with a data set `digits` must be there
# (docs/quickstart.md), `TESSERA_URL` and `TESSERA_TOKEN_FILE` set, and a model folder made by `tessera model init`.

# %%
from __future__ import annotations

import os
from pathlib import Path

from tessera.shared.api.runs import Cohort, RunSpec
from tessera.shared.cli.export import export_folder
from tessera.shared.cli.upload import upload_model
from tessera.shared.client.client import Client
from tessera.shared.client.round_outcomes import follow
from tessera.shared.methods.base import MethodSpec
from tessera.shared.metrics.rows import MetricRow, rows_of
from tessera.shared.updates.model_folder import ModelFolder

client = Client.from_environment()
print(client.about().version, [run.spec.name for run in client.runs()])

# %% [markdown]
# What a run needs: a model, which is uploaded once, a method, and what sites call the data.

# %%
folder = ModelFolder.open(Path(os.environ.get("MODEL", "model")))
uploaded = upload_model(client, folder)
spec = RunSpec(
    name="from-a-notebook",
    method=MethodSpec(name="fedavg"),
    model=uploaded.model,
    version=uploaded.version,
    dataset=os.environ.get("DATASET", "digits"),
    rounds=2,
    cohort=Cohort(size=1, quorum=1),
)

# %% [markdown]
# Who would take part? Nothing is started by asking.

# %%
found = client.preview_run(spec)
print(f"{found.eligible} workers would take part; {found.quorum} are needed")

# %%
run = client.create_run(spec)
for glimpse in follow(client, run.id, poll_seconds=0.5):
    for outcome in glimpse.ended:
        print(outcome.round.number, outcome.round.state, outcome.upload_bytes, "bytes up")
run = glimpse.run
print(run.state)

# %% [markdown]
# All that was measured, a number a row; `pandas.DataFrame(rows)` makes a table of it.

# %%
rows: list[MetricRow] = list(
    rows_of(run, client.rounds(run.id), client.versions(run.id), list(client.measurements(run.id)))
)
print(MetricRow._fields)
for row in rows[:10]:
    print(*row)

# %%
out = Path(os.environ.get("OUT", "trained"))
export_folder(client, run, out, None, lambda _: None, folder.path)
print(out, sorted(file.name for file in out.iterdir()))
client.close()
