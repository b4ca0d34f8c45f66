"""The descriptions of several sites' data together, and the faults that training on them would have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from tessera.shared.api.descriptions import UNKNOWN_SHARES, Description, TableName, bin_name
from tessera.shared.api.runs import Run, SiteReport

TITLES: Mapping[TableName, str] = {
    "classes": "Classes",
    "words": "Words of a text",
    "tokens": "Tokens of a text",
    "pixels": "Longer side of an image, in pixels",
}

UNANSWERED = "its worker is not live, or a person there has not approved the run (`tessera worker inbox`)"


@dataclass(frozen=True)
class DataAnswers:
    """The sites' answers about one data set."""

    found: Mapping[str, Description]
    """By site."""
    silent: Mapping[str, str]
    """The reason of each site that gave no description."""
    summed: SummedCounts | None = None
    """The totals of a secure sum, in place of descriptions."""

    @classmethod
    def of(
        cls, run: Run, reports: Iterable[SiteReport], others: Mapping[str, str] = MappingProxyType({})
    ) -> DataAnswers:
        """Return the answers in a run's reports. `others` has the reasons of sites that the run does not ask."""
        answers = list(reports)
        found = {each.site: each.description for each in answers if each.description}
        return cls(found, {**others, **silent_sites(run, answers, found)})

    @property
    def tables(self) -> list[CountTable]:
        """The tables that at least one site counts. Classes are matched by name where sites name them."""
        if self.summed:
            return self.summed.tables
        return [table for name in TITLES if (table := _table(name, self.found)).rows]

    @property
    def faults(self) -> list[str]:
        """Sentences about the faults that training on these sites' data would have, each with a remedy."""
        found = self.found
        return [
            *_silent(self.silent),
            *(self.summed.faults if self.summed else ()),
            *_units(found),
            *_order(found),
            *_names(found),
            *_rare(found),
            *_unknown(found),
        ]

    @property
    def meaning(self) -> str:
        """The unit and the rounding of the counts, in words."""
        if self.summed:
            return self.summed.meaning
        units = {"groups such as patients" if each.unit == "group" else "examples" for each in self.found.values()}
        steps = {each.step for each in self.found.values()}
        return f"Numbers of {' or '.join(sorted(units))}, as multiples of {' or '.join(map(str, sorted(steps)))}"

    def shown(self, site: str, count: int) -> str:
        """Return a site's count as people read it: a suppressed one looks like zero."""
        return str(count) if count else f"< {self.found[site].minimum}"


@dataclass(frozen=True)
class SummedCounts:
    """The totals of several sites' counts, of which no single site's is known."""

    sites: int
    totals: Mapping[TableName, tuple[int, ...]]

    @property
    def tables(self) -> list[CountTable]:
        """A table of each kind that some site counts."""
        tables = []
        for name in TITLES:
            counts = self.totals[name]
            first = 0 if name == "classes" else next((place for place, count in enumerate(counts) if count), 0)
            cells = ((str(place) if name == "classes" else bin_name(place)) for place in range(first, len(counts)))
            if rows := {cell: {"": count} for cell, count in zip(cells, counts[first:], strict=True)}:
                tables.append(CountTable(name, rows))
        return tables

    @property
    def faults(self) -> list[str]:
        """Sentences about classes that no site shows."""
        counts = self.totals["classes"]
        return [
            f"class {place}: each site has fewer than its minimum" for place, count in enumerate(counts) if not count
        ]

    @property
    def meaning(self) -> str:
        return (
            f"Totals of {self.sites} sites in a secure sum, of the rounded counts that each would show; the order of "
            "their labels, classes at one site alone and tokenizers are not compared"
        )


@dataclass(frozen=True)
class CountTable:
    """One table of all sites."""

    name: TableName
    rows: Mapping[str, Mapping[str, int]]
    """By cell, the count that each site shows; of sites that count this table. A secure sum's are under ''."""

    @property
    def title(self) -> str:
        return TITLES[self.name]

    @property
    def sites(self) -> tuple[str, ...]:
        return tuple(filter(None, next(iter(self.rows.values()))))

    @property
    def whole(self) -> int:
        """The sum of all counts."""
        return sum(map(self.total, self.rows))

    def of_site(self, site: str) -> int:
        """Return the sum of a site's counts."""
        return sum(counts[site] for counts in self.rows.values())

    def total(self, cell: str) -> int:
        """Return the sum of the counts that sites show."""
        return sum(self.rows[cell].values())


def silent_sites(run: Run, reports: Iterable[SiteReport], answered: Collection[str]) -> dict[str, str]:
    """Return the reason of each site that a run without rounds asked and that is not among those that answered."""
    by_site = {each.site: each for each in reports}
    asked = {*by_site, *(run.spec.cohort.sites or ())}
    return {site: _reason(by_site.get(site)) for site in sorted(asked.difference(answered))}


def _reason(report: SiteReport | None) -> str:
    if report is None:
        return UNANSWERED
    return report.problem.detail if report.problem else f"it has not answered (its task is {report.state})"


def _table(name: TableName, found: Mapping[str, Description]) -> CountTable:
    counting = {site: each for site, each in found.items() if name in each.counts}
    rows: dict[str, dict[str, int]] = {}
    for cell in _cells(name, list(counting.values())):
        rows[cell] = {site: _shown(each, name, cell) for site, each in counting.items()}
    return CountTable(name, rows)


def _cells(name: TableName, counting: Sequence[Description]) -> list[str]:
    """Return the names of a table's cells: all classes, and the bins from the first that counts to the last."""
    if name == "classes":
        sizes = ((each, max(len(each.counts[name]), len(each.class_names))) for each in counting)
        return list(dict.fromkeys(each.cell_name(name, place) for each, size in sizes for place in range(size)))
    places = {place for each in counting for place, count in enumerate(each.counts[name]) if count}
    return [bin_name(place) for place in range(min(places), max(places) + 1)] if places else []


def _shown(description: Description, name: TableName, cell: str) -> int:
    counts = description.counts[name]
    return next((count for place, count in enumerate(counts) if description.cell_name(name, place) == cell), 0)


def _silent(silent: Mapping[str, str]) -> Iterator[str]:
    for site, reason in silent.items():
        yield f"{site} gave no description: {reason}"


def _units(found: Mapping[str, Description]) -> Iterator[str]:
    units = {site: each.unit for site, each in found.items()}
    if len(set(units.values())) > 1:
        alone = ", ".join(site for site, unit in units.items() if unit == "example")
        yield (
            f"{alone}: counts examples, the others groups such as patients. Set `group` in the data set's settings "
            "there, or one patient's examples are both trained on and held out"
        )


def _order(found: Mapping[str, Description]) -> Iterator[str]:
    orders = {site: each.class_names for site, each in found.items() if each.class_names}
    if not orders:
        return
    usual = Counter(orders.values()).most_common(1)[0][0]
    for site, names in orders.items():
        if names != usual and sorted(names) == sorted(usual):
            place = next(place for place, name in enumerate(names) if name != usual[place])
            yield (
                f"{site} has the classes in another order: {names[place]!r} is class {place} there, and class "
                f"{usual.index(names[place])} at the others. Write `labels` there as {list(usual)}"
            )


def _names(found: Mapping[str, Description]) -> Iterator[str]:
    orders = {site: each.class_names for site, each in found.items() if each.class_names}
    usual = Counter(orders.values()).most_common(1)[0][0] if orders else ()
    for site, names in orders.items():
        other, lacking = sorted(set(names) - set(usual)), sorted(set(usual) - set(names))
        if other or lacking:
            said = [f"names {_listed(other)}"] * bool(other) + [f"does not name {_listed(lacking)}"] * bool(lacking)
            yield f"{site} {' and '.join(said)} among its classes. Agree on one list for `labels`"


def _rare(found: Mapping[str, Description]) -> Iterator[str]:
    for cell, counts in _table("classes", found).rows.items():
        without, having = ([site for site, count in counts.items() if bool(count) == has] for has in (False, True))
        if without:
            least = max(found[site].minimum for site in without)
            alone = f"; only {having[0]} has it" if len(having) == 1 else ""
            yield (
                f"class {cell!r}: fewer than {least} subjects at {', '.join(without)}{alone}. Sites without a class "
                "train the model to forget it: compare versions by macro F1, on data that have it"
            )


def _unknown(found: Mapping[str, Description]) -> Iterator[str]:
    for site, each in found.items():
        if each.unknown_tokens and each.unknown_tokens >= UNKNOWN_SHARES[-2]:
            yield (
                f"{site}: the tokenizer does not know more than {each.unknown_tokens:.0%} of the tokens. Use one "
                "that knows this language"
            )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:8])) + " ..." * (len(names) > 8)
