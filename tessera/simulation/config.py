"""A simulation as a TOML file: a run's spec, its initial model, and a table for its sites and their data.

rounds = 10
model = "model"
method = { name = "fedavg" }

[simulation]
sites = 8

[simulation.data]
kind = "digits"
part = { scheme = "dirichlet", alpha = 0.3 }

[simulation.test]
kind = "digits"
split = "test"
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError, model_validator

from tessera.shared.client.run_file import Note, check_spec, read_toml
from tessera.shared.lazy_import import DeferredModule
from tessera.shared.problems import Invalid, faults_of
from tessera.shared.schema import Label, Resources, Value
from tessera.simulation.conditions import Conditions, unknown_sites
from tessera.worker.data.partition.schemes import MAX_SITES, Partition
from tessera.worker.errors import DataError
from tessera.worker.settings import DataSource

if TYPE_CHECKING:
    from tessera.simulation import virtual_sites
    from tessera.worker import inventory
    from tessera.worker.data import dataset, registry
    from tessera.worker.data.partition import division
else:
    inventory = DeferredModule("tessera.worker.inventory")
    dataset = DeferredModule("tessera.worker.data.dataset")
    registry = DeferredModule("tessera.worker.data.registry")
    division = DeferredModule("tessera.worker.data.partition.division")
    virtual_sites = DeferredModule("tessera.simulation.virtual_sites")

T = TypeVar("T", bound=BaseModel)

REMEDY = "Fix the named settings and try again."
NO_TABLE = "Add one with `sites`, and the data to divide in [simulation.data]: `tessera docs simulating` has both."


class Pool(BaseModel):
    """A data set to be divided among the sites; further keys are the options of its kind."""

    model_config = ConfigDict(frozen=True, extra="allow")

    kind: str
    part: Partition | None = Field(
        default=None, description="how it is divided; `count` defaults to the number of sites"
    )
    held_out: float | None = Field(default=None, gt=0, lt=1, description="share of each part kept out of training")

    @cached_property
    def makers(self) -> list[Callable[[], dataset.Dataset]]:
        """Functions that return each site's part. Loads the whole data set, which stays in memory."""
        whole = registry.load(self.kind, self.model_extra or {})
        return division.makers(whole, self.part) if self.part else [lambda: whole]

    def site(self, index: int, key: bytes) -> dataset.Dataset:
        """Return the examples of one site; `key` decides which are held out. Raises DataError."""
        part = self.makers[index]()
        return part if self.held_out is None else division.hold_out(part, self.held_out, key)


class SimulationTable(Conditions):
    """The file's `[simulation]`."""

    sites: Annotated[int, Field(ge=1, le=MAX_SITES)] | tuple[Label, ...] | dict[Label, DataSource] = Field(
        description="the number of sites or their names, to divide `data` among; or a data set for each, by name"
    )
    data: Pool | None = None
    test: DataSource | None = Field(default=None, description="central data on which every version is measured")
    resources: dict[Label, Resources] = Field(default={}, description="each site's resource limits per task")
    changes: dict[Label, dict[Annotated[int, Field(ge=2)], DataSource]] = Field(
        default={}, description="by site and round, data that take the place of the site's from that round on"
    )

    @model_validator(mode="before")
    @classmethod
    def _counts_sites(cls, given: Any) -> Any:
        """Insert the number of sites as the default of `data.part.count`."""
        if not (isinstance(given, dict) and isinstance(data := given.get("data"), dict)):
            return given
        sites, division = given.get("sites"), data.get("part")
        if not isinstance(division, dict) or "count" in division:
            return given
        count = len(sites) if isinstance(sites, list | dict) else sites
        return {**given, "data": {**data, "part": {**division, "count": count}}}

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if isinstance(self.sites, dict):
            if self.data:
                raise ValueError("sites have data of their own: leave out data, or give only the sites' names")
        elif self.data is None:
            raise ValueError(
                "data: name the data set to divide among the sites, or give each site a table of its own"
            )
        elif self.data.part is None and len(self.names) > 1:
            raise ValueError("data.part: choose how the data are divided, as in part = { scheme = 'iid' }")
        elif self.data.part and self.data.part.count != len(self.names):
            raise ValueError(f"data.part.count: there are {len(self.names)} sites; leave it out")
        named = {**self.named_sites, "resources": self.resources, "changes": self.changes}
        if unknown := [
            said for setting, sites in named.items() for said in unknown_sites(setting, sites, self.names)
        ]:
            raise ValueError("; ".join(unknown))
        return self

    @property
    def names(self) -> list[str]:
        if isinstance(self.sites, int):
            width = len(str(self.sites))
            return [f"site-{number:0{width}}" for number in range(1, self.sites + 1)]
        return list(self.sites)

    def population(self, seed: int) -> dict[str, virtual_sites.VirtualSite]:
        """Return every site, its data not loaded yet; `seed` decides which examples are held out."""
        key = division.key_of_seed(seed)
        return {
            name: virtual_sites.VirtualSite(make, self._resources(name), changes=self._changes(name, key))
            for name, make in self._makers(key).items()
        }

    def _changes(self, site: str, key: bytes) -> dict[int, Callable[[], dataset.Dataset]]:
        return {
            number: partial(_loaded, f"simulation.changes.{site}.{number}", partial(inventory.load_source, own, key))
            for number, own in self.changes.get(site, {}).items()
        }

    def _resources(self, site: str) -> dict[str, float]:
        return {str(kind): value for kind, value in self.resources.get(site, {}).items()}

    def _makers(self, key: bytes) -> dict[str, Callable[[], dataset.Dataset]]:
        if isinstance(self.sites, dict):
            return {
                name: partial(_loaded, f"simulation.sites.{name}", partial(inventory.load_source, own, key))
                for name, own in self.sites.items()
            }
        pool = self.data
        return {
            name: partial(_loaded, "simulation.data", partial(pool.site, place, key))
            for place, name in enumerate(self.names)
            if pool
        }

    def central(self) -> dataset.Dataset | None:
        return _loaded("simulation.test", partial(inventory.load_source, self.test)) if self.test else None


class SweepTable(Value):
    """The file's `[sweep]`: the values of each dotted key that its simulations vary, and their seeds."""

    vary: dict[str, Annotated[list[Any], Field(min_length=1)]] = Field(min_length=1)
    seeds: Annotated[tuple[NonNegativeInt, ...], AfterValidator(lambda seeds: tuple(dict.fromkeys(seeds)))] = ()


@dataclass(frozen=True)
class SimulationFile:
    """The content of a simulation file."""

    spec: Mapping[str, Any]
    model: Path | None
    table: SimulationTable
    sweep: SweepTable | None = None


def read_file(file: Path, settings: Iterable[str] = (), note: Note = lambda _: None) -> SimulationFile:
    """Return the file with `KEY=VALUE` settings applied. Raises Invalid with every invalid one."""
    given = {"name": "simulation", "dataset": "data", **read_toml(file, settings, note)}
    table, model, sweep = (given.pop(name, None) for name in ("simulation", "model", "sweep"))
    check_spec(file, given, installed=True)
    if not isinstance(model, str | None):
        raise Invalid(f"{file}: the model is {model!r}, not a folder's name", remedy=REMEDY)
    if table is None:
        raise Invalid(f"{file} has no [simulation] table", remedy=NO_TABLE)
    federation = _table(file, "simulation", SimulationTable, table)
    varied = None if sweep is None else _table(file, "sweep", SweepTable, sweep)
    return SimulationFile(given, None if model is None else Path(model), federation, varied)


def _table(file: Path, name: str, kind: type[T], given: object) -> T:
    try:
        return kind.model_validate(given)
    except ValidationError as fault:
        errors = faults_of(fault, f"/{name}", kind)
        raise Invalid(f"{file} does not describe a valid federation", errors=errors, remedy=REMEDY) from None


def _loaded(where: str, make: Callable[[], dataset.Dataset]) -> dataset.Dataset:
    try:
        return make()
    except DataError as fault:
        raise Invalid(f"{where}.{fault}", remedy=REMEDY) from fault
