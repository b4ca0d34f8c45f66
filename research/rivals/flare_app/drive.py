"""Holds a FLARE federation in POC mode, and submits a job for each line on standard input: `ROUNDS TIMES-FILE`.

FLARE's recipe for FedAvg with torch as it comes, its tensors sent as tensors. Runs in FLARE's environment.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from drifting_model import Drifting, Times
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.client.config import ExchangeFormat
from nvflare.recipe.poc_env import PocEnv
from nvflare.tool.poc.poc_commands import _start_poc, prepare_poc_provision

HERE = Path(__file__).parent


class Standing(PocEnv):
    """Deploys to services that run already, where PocEnv would start them anew for each job."""

    def begin(self) -> None:
        prepare_poc_provision(
            clients=[],
            number_of_clients=self.num_clients,
            workspace=self.poc_workspace,
            docker_image=None,
            use_he=False,
            project_conf_path="",
            examples_dir=None,
        )
        _start_poc(poc_workspace=self.poc_workspace, gpu_ids=[], excluded=[self.username], services_list=[])

    def deploy(self, job) -> str:
        return self._get_session_manager().submit_job(job)


def main(weights: str, workers: int) -> None:
    # What FLARE prints is for people; ours is one line for each thing done.
    out = sys.stdout
    environment = Standing(num_clients=workers)
    with contextlib.redirect_stdout(sys.stderr):
        environment.begin()
    print("ready", file=out, flush=True)
    try:
        for line in sys.stdin:
            rounds, times = line.split()
            with contextlib.redirect_stdout(sys.stderr):
                recipe = FedAvgRecipe(
                    name="drifting",
                    model=Drifting(weights),
                    min_clients=workers,
                    num_rounds=int(rounds),
                    train_script=str(HERE / "drifting_client.py"),
                    server_expected_format=ExchangeFormat.PYTORCH,
                )
                recipe._job.to_server(Times(times), id="times")  # noqa: SLF001  (there is no other way in)
                run = recipe.execute(environment)
            print(run.get_job_id(), file=out, flush=True)
            with contextlib.redirect_stdout(sys.stderr):
                # Not `run.get_result`, which stops the servers too.
                environment.get_job_result(run.get_job_id())
            print("done", file=out, flush=True)
    finally:
        with contextlib.redirect_stdout(sys.stderr):
            environment.stop(clean_up=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
