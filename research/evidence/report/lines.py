"""The report's lines: tables, claims with their verdicts, and answers to questions."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from common.document import table_head, table_row
from evidence.jobs import at_end, choice, tried, tuned_cell
from evidence.plan import SITES, Claim, Plan, Setting, Table
from evidence.report.findings import NOT_FLAT, Finding, findings
from evidence.report.rows import Found, Row, Run, drift, no_drift, row, score_of, void
from evidence.statistics import described, shown_interval, shown_spread
from evidence.store import job_of
from tessera.simulation.comparison.statistics import paired


def lines(plan: Plan, found: Found, tables: Collection[str] = ()) -> Iterator[str]:
    """Yield the report in Markdown, line by line."""
    for name, table in plan.tables.items():
        if not tables or name in tables:
            yield from _of_table(plan, found, name, table)
    yield from _claims(plan, found, tables)
    yield from _at_other_times(plan, found, tables)
    yield from _by_machine(plan, found, tables)
    yield from _questions(plan, found)


def _of_table(plan: Plan, found: Found, name: str, table: Table) -> Iterator[str]:
    yield f"\n### {name}: {table.title}\n"
    yield table.question
    of_table = {job: figures for job, figures in found.items() if job.table == name}
    rows = [job for job in of_table if job.seed != plan.protocol.tuning_seed]
    rounds = table.concluding.rounds or table.rounds
    yield (
        f"\n{len(rows)} runs, and {len(of_table) - len(rows)} that chose learning rates. {rounds} rounds of "
        f"{table.training.get('steps')} steps of {table.training.get('batch_size')}, "
        f"{table.sites_a_round or 'all'} sites a round."
    )
    if table.rules == 2:
        count = plan.final_count(table, rounds, table.part)
        yield (
            f"The final figure of the part {table.part} is the mean of the last {count} versions, each on all of its "
            f"examples; other parts have the last {plan.protocol.final_versions}."
        )
    if lost := drift(plan, found, name):
        verdict = no_drift(plan, found, name, table.concluding)
        yield (
            f"Drift gate: `{table.reference}` loses {shown_interval(lost)} to the same runs in {table.alike}: "
            f"{'shut, so that nothing is concluded' if verdict else 'passed'}."
        )
    run = {job.setting for job in rows}
    for setting in table.settings:
        if setting.name in run:
            yield from _of_setting(plan, found, name, setting)
    if missing := [setting.name for setting in table.settings if setting.name not in run]:
        yield f"\nSettings that were not run: {', '.join(missing)}."
    if len(rows) < len(of_table):
        yield from _rates(plan, of_table, name)
    yield from _costs(of_table)


def _of_setting(plan: Plan, found: Found, name: str, setting: Setting) -> Iterator[str]:
    table = plan.tables[name]
    yield f"\n#### {name}, {setting.name}\n"
    if reason := void(plan, found, name, setting):
        yield f"**Void**: {reason}.\n"
    rows = [each for arm in table.arms_of(setting) if (each := row(plan, found, name, setting, arm)).runs]
    if not rows:
        yield "No run at a chosen learning rate is finished."
        return
    reference = row(plan, found, name, table.reference_of(setting), table.arm(table.reference))
    parts = list(dict.fromkeys(part["part"] for part in next(iter(rows[0].runs.values()))["majority"]))
    parts.sort(key=lambda part: (part != table.part, part == SITES))
    budgets = _budgets(plan, found, name, setting)
    heads = [heading(part, table) for part in parts]
    # A site's own test is small: only tables about the sites compare it.
    compared = [part for part in parts if part != SITES or table.part == SITES]
    less = f"less {table.reference}" + (f", {NOT_FLAT}" if reference.is_rising else "")
    heads += ["worst site", "spread of sites", *(f"{part} {less}" for part in compared)]
    heads += ["slope", "jitter", "MB up", "MB down"]
    at_bytes = reference.at_bytes(budgets)
    heads += [f"{parts[0]} at the bytes of {table.equal_bytes}", f"that {less}"] if budgets else []
    yield from table_head(["arm", "seeds", *heads])
    most = {
        each["part"]: 100 * each[score_of(each["part"], table)]
        for each in next(iter(rows[0].runs.values()))["majority"]
    }
    shares = " | ".join(f"{most[part]:.1f}" for part in parts)
    rest = " |" * (len(heads) - len(parts))
    yield f"| most frequent class of all sites | | {shares} |{rest}"
    if seeds := reference.zero_shot(table.part):
        untrained = " | ".join(shown_spread([*reference.zero_shot(part).values()]) for part in parts)
        yield f"| zero-shot, without prompts | {len(seeds)} | {untrained} |{rest}"
    for each in rows:
        diverged = f", {len(each.diverged)} diverged" if each.diverged else ""
        cells = [each.arm.name, f"{len(each.runs)}{diverged}"]
        cells += [shown_spread([*each.final(part).values()]) for part in parts]
        cells.append(shown_spread([*each.final(SITES, "accuracy", worst=True).values()]))
        cells.append(shown_spread([*each.spread().values()]))
        own = each.arm.name == table.reference
        differences = (paired(each.final(part), reference.final(part)) for part in compared)
        cells += ["" if own else shown_interval(values) for values in differences]
        slope = (
            "-"
            if each.trend is None
            else f"{each.trend.slope:+.2f} ± {each.trend.error:.2f}" + (f", {NOT_FLAT}" if each.is_rising else "")
        )
        cells += [slope, shown_spread([*each.jitter.values()], 2)]
        for moved in (each.megabytes("upload"), each.megabytes("download")):
            # Prompts are kilobytes.
            cells.append(shown_spread(moved, 0 if max(moved, default=0) >= 1 else 3))
        if budgets:
            reached = {} if each.arm.central else each.at_bytes(budgets)
            cells += [shown_spread([*reached.values()]), "" if own else shown_interval(paired(reached, at_bytes))]
        yield table_row(cells)
    shown = {each.arm.name for each in rows}
    if missing := [arm.name for arm in table.arms_of(setting) if arm.name not in shown]:
        yield f"\nArms that were not run: {', '.join(missing)}."
    yield from _selections(rows)
    yield from _warmups(rows)


def _selections(rows: Sequence[Row]) -> Iterator[str]:
    """Yield how the sites' selections of layers change and overlap, for the rows that select any."""
    found = {each.arm.name: figures for each in rows if (figures := each.of_selections())}
    if not found:
        return
    yield "\nSelections of layers: those that a site did not train the last time, of each round; the overlap of two"
    yield "sites' selections (Jaccard index), that of random ones of the same size, and the share of layers that any"
    yield "site trained.\n"
    yield "| arm | new layers | overlap | by chance | any site |"
    yield "|---|---|---|---|---|"
    for arm, figures in found.items():
        cells = [shown_spread(figures[name], 2) for name in ("turnover", "overlap", "chance", "union")]
        yield table_row([arm, *cells])


def _warmups(rows: Sequence[Row]) -> Iterator[str]:
    """Yield what was measured of warm-ups: their ends, and how far the sites' steps differ from their mean."""
    found = [each for each in rows if any(each.drifts().values())]
    if not found:
        return
    yield "\nWarm-ups: rounds, and the disagreement of the sites (the rms distance of their steps from the mean step)"
    yield "over the mean step's length, on the blocks that the second stage would freeze.\n"
    yield "| arm | rounds | first five rounds | last five rounds |"
    yield "|---|---|---|---|"
    for each in found:
        drifts = list(each.drifts().values())
        cuts = slice(None, 5), slice(-5, None)
        ends = [shown_spread([fmean(part) for drift in drifts if (part := drift[cut])]) for cut in cuts]
        yield table_row([each.arm.name, shown_spread(each.warmups(), 0), *ends])


def heading(part: str, table: Table) -> str:
    return f"{part}, {score_of(part, table).replace('_', ' ')}"


def _budgets(plan: Plan, found: Found, name: str, setting: Setting) -> dict[int, float]:
    """Return the megabytes, both ways, that the table's measure of bytes took, by seed."""
    table = plan.tables[name]
    if table.equal_bytes is None:
        return {}
    measure = row(plan, found, name, setting, table.arm(table.equal_bytes))
    return {seed: totals[-1] for seed, totals in measure.moved().items()}


def _rates(plan: Plan, found: Found, name: str) -> Iterator[str]:
    """Yield the learning rates, by the validation score on the tuning seed."""
    scores = {job: figures["score"] for job, figures in found.items()}
    yield f"\n#### {name}, learning rates: validation score on seed {plan.protocol.tuning_seed}\n"
    yield "| arm | setting | chosen | tried |"
    yield "|---|---|---|---|"
    table = plan.tables[name]
    for setting in table.settings:
        # Some settings have the rates of arms that run in others alone.
        for arm in table.arms:
            cell = name, setting.name, arm.name
            of_cell = tried(plan, scores, cell)
            if of_cell and tuned_cell(plan, cell) == cell:
                rate = choice(plan, scores, cell)
                shown = "-" if rate is None else f"{rate:g}" + (", at an end" if at_end(plan, scores, cell) else "")
                values = ", ".join(f"{each:g}: {100 * score:.1f}" for each, score in sorted(of_cell.items()))
                yield f"| {arm.name} | {setting.name} | {shown} | {values} |"


def _costs(found: Found) -> Iterator[str]:
    """Yield what the runs took, by machine."""
    by_machine: dict[str, list[Run]] = {}
    for figures in found.values():
        by_machine.setdefault(figures["machine"], []).append(figures)
    for machine, of_machine in sorted(by_machine.items()):
        seconds, of_core = ([run[name] for run in of_machine] for name in ("seconds", "cpu_seconds"))
        yield (
            f"\n{len(of_machine)} runs took {shown_spread(seconds, 0)} seconds each, {shown_spread(of_core, 0)} of a "
            f"core, on {machine}{_versions(of_machine)}."
        )


def _versions(runs: Sequence[Run]) -> str:
    found = sorted({run["code"] for run in runs if run.get("code")})
    return f", by the code of {', '.join(found)}" if found else ""


def _claims(plan: Plan, found: Found, tables: Collection[str]) -> Iterator[str]:
    protocol = plan.protocol
    made = [each for each in findings(plan, found) if not tables or each.table in tables]
    yield "\n### Claims\n"
    yield (
        "Differences are in points, paired by seed, with 95 % t-intervals; d_z has Hedges' correction. `p` is the "
        "exact sign-flip test's, and for an equivalence that of two one-sided t-tests. In bold: headline claims, "
        f"with p adjusted by Holm over those of the paper. Verdicts are at {protocol.significance:g}. There is none "
        f"for void tables, for rows that are {NOT_FLAT} or have a seed that diverged, before all seeds of the plan "
        "have run, and of a difference for five seeds, whose sign-flip test cannot reach that p. That a difference "
        "is within the margin, or beyond it, is adjusted by the second rules (D-t) alone. A rate at an end is the "
        "smallest or largest that was tried: another one may do better.\n"
    )
    yield "| claim | difference | seeds | positive | d_z | p | verdict |"
    yield "|---|---|---|---|---|---|---|"
    missing = [each for each in made if not each.differences]
    for each in made:
        if each in missing:
            continue
        text = f"{each.claim.name} {each.claim.text}" + (
            f" (within {each.claim.margin:g})" if each.claim.kind == "equivalent" else ""
        )
        count, cells = len(each.differences), ["-", "-", "-"]
        if count > 1:
            about = described(each.differences)
            p = each.p if each.adjusted is None else each.adjusted
            size = "-" if count < 3 else f"{about['d_z']:+.2f}"
            cells = [f"{about['positive']} of {count}", size, "-" if p is None or each.hindrance else f"{p:.3g}"]
        title = f"**{text}**" if each.claim.headline else text
        verdict = each.verdict(protocol.significance)
        yield table_row([title, shown_interval(each.differences), str(count), *cells, verdict])
    if missing:
        yield f"\nNot run: {'; '.join(f'{each.claim.name} {each.claim.text}' for each in missing)}."


def _at_other_times(plan: Plan, found: Found, tables: Collection[str]) -> Iterator[str]:
    """Yield the differences of headline claims at other times than the plan says, for the reader's doubts."""
    yield "\n### Headline differences at other times\n"
    yield (
        "Not planned, and added after most runs: no verdict follows. A mean over all versions of the second half of "
        "the rounds varies less than the planned one over the last five. Where the difference halfway is another, it "
        "depends on the number of rounds. Jitter is that of versions about their own line. All are on the examples "
        "of curves, for the seeds that both arms have.\n"
    )
    yield "| claim | arms | second half | the last five versions of the first half | jitter |"
    yield "|---|---|---|---|---|"
    for claim, one, other in _headline_pairs(plan, found, tables):
        if one.table.rules == 2:
            continue
        part = SITES if one.arm.personal or other.arm.personal else one.table.part
        cells = [
            shown_interval(paired(one.second_half(part), other.second_half(part))),
            shown_interval(paired(one.halfway(part), other.halfway(part))),
            shown_interval(paired(one.jitter, other.jitter), 2),
        ]
        yield table_row([claim.name, f"{claim.arm} less {claim.against}", *cells])


def _headline_pairs(plan: Plan, found: Found, tables: Collection[str]) -> Iterator[tuple[Claim, Row, Row]]:
    """Yield each headline claim with the rows of its two arms, if both have runs."""
    for name, table in plan.tables.items():
        for claim in table.claims if not tables or name in tables else ():
            if claim.headline:
                one, other = (
                    row(plan, found, name, table.concluding, table.arm(arm)) for arm in (claim.arm, claim.against)
                )
                if one.runs and other.runs:
                    yield claim, one, other


def _by_machine(plan: Plan, found: Found, tables: Collection[str]) -> Iterator[str]:
    """Yield the differences of headline claims by the machine that computed both arms, where there are several."""
    shown = []
    for claim, *pair in _headline_pairs(plan, found, tables):
        one, other = (each.final(claim.part or each.table.part, worst=claim.worst) for each in pair)
        by_machine: dict[str, list[float]] = {}
        for seed in sorted(one.keys() & other.keys()):
            machines = {each.runs[seed]["machine"] for each in pair}
            if len(machines) == 1:
                by_machine.setdefault(machines.pop(), []).append(one[seed] - other[seed])
        if len(by_machine) > 1:
            shown += [
                f"| {claim.name} | {claim.arm} less {claim.against} | {machine.split(',')[0]} | "
                f"{len(values)} | {shown_interval(values)} |"
                for machine, values in sorted(by_machine.items())
            ]
    if shown:
        yield "\n### Headline differences by machine\n"
        yield (
            "Not planned: no verdict follows. Each machine had other seeds, and few. Pairs of two machines are left "
            "out.\n"
        )
        yield "| claim | arms | machine | seeds | difference |"
        yield "|---|---|---|---|---|"
        yield from shown


def _questions(plan: Plan, found: Found) -> Iterator[str]:
    """Yield the questions of the papers and of their reviewers, with what the claims answer."""
    if not plan.questions:
        return
    yield "\n### Questions of the papers and of their reviewers\n"
    yield "Differences are those of the claims above, in points, with 95 % intervals."
    by_claim = {each.claim.name: each for each in findings(plan, found)}
    for paper in dict.fromkeys(question.paper for question in plan.questions):
        yield f"\n{paper}:\n"
        for question in plan.questions:
            if question.paper == paper:
                answers = "; ".join(_answer(plan, by_claim[name]) for name in question.claims) + "."
                yield f"- *{question.text}* {answers if question.claims else question.answer}"


def _answer(plan: Plan, each: Finding) -> str:
    difference = f" {shown_interval(each.differences)}," if each.differences else ""
    return f"{each.claim.name}:{difference} {each.verdict(plan.protocol.significance)}"


def repeated_lines(repeated: Sequence[Run]) -> Iterator[str]:
    """Yield the results of runs that were repeated over HTTP."""
    yield "\n### Over HTTP\n"
    yield "`python -m evidence.over_http --save` repeats runs between real processes, a coordinator and a"
    yield "worker for each site, and compares the digests of the last versions.\n"
    yield from map(repeated_line, repeated)


def repeated_line(each: Mapping[str, Any]) -> str:
    """Return what was found of a repeated run, as an item of a list.

    Its seconds are left out: the machine may do other work meanwhile.
    """
    verdict = "the same digest" if each["digest"] == each["simulated"] else f"another digest than {each['simulated']}"
    return (
        f"- {job_of(each).name}: {verdict}, {each['digest']}; {each['received_bytes'] / 1e6:.0f} MB received and "
        f"{each['sent_bytes'] / 1e6:.0f} MB sent by the coordinator; on {each['machine']}"
    )
