"""`simulate`: run a whole federation in one process."""

import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import ValidationError
from transformers import PreTrainedModel

from tessera.shared.api.runs import RunSpec
from tessera.shared.client.model_upload import InitialModel, ModelUpload, upload_model
from tessera.shared.methods.registry import own_file_digest
from tessera.shared.model.blocks import Block
from tessera.shared.model.preprocessing import FileName
from tessera.shared.model.spec import Head, Model
from tessera.shared.problems import Fault, Invalid, faults_of
from tessera.shared.rounds.planning import begun, check_method
from tessera.shared.rounds.validation import HeldUpdates, Inspector
from tessera.shared.rounds.versions import States
from tessera.shared.tensors.lazy import Array, as_bytes
from tessera.shared.updates.model_folder import ModelFolder
from tessera.simulation.blob_folder import Folder
from tessera.simulation.checkpoint import SETTINGS, claim
from tessera.simulation.conditions import Conditions, unknown_sites
from tessera.simulation.coordinator import VirtualCoordinator
from tessera.simulation.engine import Simulation, Watch
from tessera.simulation.profiles import Profiles, VirtualClock
from tessera.simulation.result import Result
from tessera.simulation.virtual_sites import DataSizes, VirtualSite, VirtualSites
from tessera.simulation.virtual_workers import Workers
from tessera.simulation.worker_processes import WorkerProcesses
from tessera.worker.data.dataset import Dataset
from tessera.worker.inventory import device_of
from tessera.worker.model.block_map import block_table, named_tensors
from tessera.worker.model.build import read_block
from tessera.worker.state.atomic_files import alone_or
from tessera.worker.stores import mappings_of

HELD_BYTES = 64 << 20
"""The limit of checked updates that are held in memory until they are merged."""
RESULTS_DEPEND_ON = {"dropout", "away", "policy", "speed", "line", "absence", "jitter"}
TEST = "test"
"""The default name of the central data set."""


@dataclass(frozen=True)
class Weights:
    """A model in memory to start from. Implements `shared.client.model_upload.InitialModel`."""

    model: Model
    values: Mapping[str, Array]

    @classmethod
    def of(cls, model: PreTrainedModel, config: Mapping[str, Any], head: Head) -> Self:
        """Return the weights of a transformers model, with the config that builds it."""
        blocks, tensors = block_table(model), named_tensors(model)
        values = {block.name: read_block(tensors, block) for block in blocks}
        return cls(Model(config=dict(config), head=head, blocks=blocks), values)

    def blocks(self) -> Iterator[tuple[Block, memoryview]]:
        for block in self.model.blocks:
            yield block, as_bytes(self.values[block.name])

    def files(self) -> dict[FileName, bytes]:
        return {}


def simulate(
    spec: Mapping[str, Any],
    model: InitialModel | Path,
    sites: Mapping[str, Dataset | VirtualSite],
    *,
    test: Dataset | None = None,
    conditions: Conditions | None = None,
    out: Path | None = None,
    until: int | None = None,
    watch: Watch = lambda _: None,
) -> Result:
    """Run a federation in this process, as it would run over HTTP.

    Given the sites' keys (`VirtualSite.audit_key`), the results are bit for bit the same.

    `spec` is a run's as `tessera run create` takes it: `method` and `rounds` at least. `sites` train, by name. Every
    version is measured on the central `test` set, unless `spec.evaluation` sets otherwise. Progress is stored in
    `out`, and a later call resumes it; without `out` it is deleted with the result. `until` stops at that version.

    Raises Invalid for an invalid spec, conditions of unknown sites and an `out` with another simulation, Stalled if a
    round cannot reach its quorum, and the exceptions of a method's own code.
    """
    start = ModelFolder.open(model) if isinstance(model, Path) else model
    if start.model.external:
        raise Invalid(
            "a simulation needs the bytes of the model's base, which is external",
            remedy="Create the model folder without --external-base.",
        )
    conditions = conditions or Conditions()
    if faults := [
        said for name, named in conditions.named_sites.items() for said in unknown_sites(name, named, sites)
    ]:
        raise Invalid("; ".join(faults), remedy="Name a site as `sites` names it.")
    federation = _Federation(spec, start, sites, test, conditions)
    if out is not None:
        return federation.run(out, until, watch)
    folder = Path(tempfile.mkdtemp(prefix="tessera-simulation-"))
    with ExitStack() as undo:
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
        result = federation.run(folder, until, watch)
        weakref.finalize(result, undo.pop_all().close)
        return result


@dataclass(frozen=True)
class _Federation:
    """A simulation, without its folder."""

    given: Mapping[str, Any]
    start: InitialModel
    sites: Mapping[str, Dataset | VirtualSite]
    test: Dataset | None
    conditions: Conditions

    def run(self, folder: Path, until: int | None, watch: Watch) -> Result:
        def refuse(reason: str) -> Invalid:
            return Invalid(reason, remedy="Choose another folder, or wait until this one is free.")

        with alone_or(refuse, folder), _threads(self.conditions.threads), self._begun(folder) as simulation:
            over = simulation.run(until, watch)
            return simulation.result(folder, over=over)

    @contextmanager
    def _begun(self, folder: Path) -> Iterator[Simulation]:
        blobs, model = Folder(folder / "blobs"), self.start.model
        uploaded = upload_model(blobs, self.start)
        spec = _spec(self.given, uploaded, is_tested=self.test is not None)
        device, mappings = device_of(self.conditions.device), mappings_of(self.conditions.mappings)
        population = VirtualSites(self.sites, self.conditions.loaded)
        claim(folder / SETTINGS, self._identity(spec, population), "a simulation")
        states = States(blobs)
        inspector = Inspector(blobs, states, HeldUpdates(HELD_BYTES))
        helpers = spec.secure_sums.helpers if spec.secure_sums else ()
        about = (population, self.test, helpers, blobs, states, folder, device, self.conditions.policy, mappings)
        workers = Workers(*about)
        coordinator = VirtualCoordinator(folder, VirtualClock(), blobs, states, inspector)
        try:
            with WorkerProcesses(workers, self.conditions.processes) as processes:
                simulation = Simulation(
                    spec=spec,
                    model=model,
                    population=population,
                    test_examples=self.test.examples if self.test else 0,
                    conditions=self.conditions,
                    profiles=Profiles(self.conditions, tuple(population.holdings), spec.seed),
                    blobs=blobs,
                    inspector=inspector,
                    coordinator=coordinator,
                    workers=workers,
                    processes=processes,
                )
                if not coordinator.run_id:
                    manifest = states.manifest(uploaded.version)
                    files = (ref.digest for ref in states.model(uploaded.model).preprocessing.values())
                    start = {uploaded.model, uploaded.version, *manifest.digests, *files}
                    coordinator.begin(spec, [*population.holdings, simulation.evaluator], start)
                yield simulation
        finally:
            coordinator.close()

    def _identity(self, spec: RunSpec, population: VirtualSites) -> dict[str, Any]:
        """Return the inputs that determine the results. Modules that a method's file imports are not among them."""
        sites, test = population.identity(), asdict(DataSizes.of(self.test)) if self.test else None
        said = self.conditions.model_dump(mode="json", include=RESULTS_DEPEND_ON)
        # Without it, a changed method would seem to have the results of the former method.
        code = own_file_digest(spec.method.name)
        return {"spec": spec.model_dump(mode="json"), "sites": sites, "test": test, "method_file": code, **said}


@contextmanager
def checks_of(
    start: ModelFolder, *, is_tested: bool
) -> Iterator[tuple[ModelUpload, Callable[[Mapping[str, Any]], None]]]:
    """Yield the model's digests, and a function that raises Invalid for a spec which a simulation from this model
    would refuse before its first round. Torch has no threads meanwhile, which would be missing in a fork."""
    with tempfile.TemporaryDirectory(prefix="tessera-check-") as folder, _threads(1):
        states = States(blobs := Folder(Path(folder)))
        uploaded = upload_model(blobs, start)
        first = states.load(start.model, states.manifest(uploaded.version), 0)

        def check(spec: Mapping[str, Any]) -> None:
            begun(_spec(spec, uploaded, is_tested=is_tested), start.model, first)

        yield uploaded, check


def _spec(given: Mapping[str, Any], uploaded: ModelUpload, *, is_tested: bool) -> RunSpec:
    plain = {"name": "simulation", "dataset": "data", **given, "model": uploaded.model, "version": uploaded.version}
    if is_tested:
        plain["evaluation"] = {"dataset": TEST, **(plain.get("evaluation") or {})}
    try:
        spec = RunSpec.model_validate(plain)
    except ValidationError as fault:
        raise Invalid(
            "the spec does not describe a valid run",
            errors=faults_of(fault, model=RunSpec),
            remedy="Fix the named fields.",
        ) from None
    check_method(spec.method)
    if spec.describe or spec.membership_attack or spec.rehearsal:
        raise Invalid(
            "a simulation trains; it describes, attacks and rehearses nothing",
            remedy="Leave describe, membership_attack and rehearsal out.",
        )
    if spec.evaluation and spec.evaluation.dataset and not is_tested:
        missing = Fault(pointer="/evaluation/dataset", detail=f"{spec.evaluation.dataset} is not given")
        raise Invalid("the run is to be measured on data that are not there", errors=[missing], remedy="Give them.")
    return spec


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
