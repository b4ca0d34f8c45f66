"""The model card and the first page of a dossier: its records in words."""

import json
import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from tessera.coordinator.dossier.records import Record, far_below
from tessera.shared.api.audit_chain import mapped
from tessera.shared.api.runs import Coverage, RunSpec
from tessera.shared.sanitize import fit_to_show

PIPELINES = {
    "masked-lm": "fill-mask",
    "causal-lm": "text-generation",
    "seq2seq-lm": "text2text-generation",
    "contrastive": "zero-shot-image-classification",
    "features": "feature-extraction",
}
"""The hub's names of tasks, by the heads that have another name there."""

MARKDOWN = re.compile(r"[\\`*_{}\[\]#+!|<>&~$@]|^[-=]|[:.](?=[A-Za-z/])")
"""Characters that may begin markup or a link."""

UNKNOWN = (
    "the use of the model, and whether it is fit for that",
    "single records of any site, and whether the sites' counts and figures of their own data are right",
    "the legal basis on which a site takes part, and who approved the run there: its own ledger has the names",
    "which other data the first version of the model was trained on, before this run",
    "copies of the model outside of this coordinator",
)


def model_card(found: Record) -> str:
    """Return the model card in Markdown, with the hub's metadata in front."""
    return f"---\n{_metadata(found)}---\n{_page('card.md', found)}"


def front_page(found: Record) -> str:
    """Return the first page as one HTML file, for readers who are not engineers."""
    return _page("report.html", found)


def _page(name: str, found: Record) -> str:
    said = {"concerns": list(concerns(found)), "promises": list(promises(found)), "unknown": UNKNOWN}
    merged = [site for site in found["sites"] if site["versions_merged"]]
    return _environment(html=name.endswith("html")).get_template(name).render(**found, **said, merged=merged)


@cache
def _environment(*, html: bool) -> Environment:
    jinja = Environment(
        loader=PackageLoader("tessera.coordinator.dossier"),
        autoescape=html,  # noqa: S701 (in Markdown, `finalize` escapes each value)
        finalize=fit_to_show if html else _as_markdown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    jinja.filters |= {"score": score, "code": _code, "count": _count, "when": _when, "indented": _indented}
    return jinja


def _as_markdown(value: Any) -> Any:
    """Return a value as text without markup, on one line."""
    if isinstance(value, Markup):
        return value
    return MARKDOWN.sub(r"\\\g<0>", " ".join(str(fit_to_show(str(value))).split()))


def _code(digest: str) -> Markup:
    return Markup(f"`{digest}`")  # noqa: S704 (no HTML)


def _indented(line: str) -> Markup:
    """Return a line of a block of code, in which Markdown knows no markup."""
    return Markup(fit_to_show(line))  # noqa: S704 (no HTML)


def _when(instant: str) -> str:
    return f"{datetime.fromisoformat(instant):%d %B %Y, %H:%M} UTC"


def _count(number: float | None) -> str:
    return "not known" if number is None else f"{number:,.0f}"


def score(one: Record, name: str) -> str:
    """Return a score with its interval in words."""
    values = [one[key] for key in ("value", "low", "high") if one[key] is not None]
    # A site may report any number.
    is_share = "accuracy" in name and all(0 <= value <= 1 for value in values)
    shown = [f"{100 * value:.1f} %" if is_share else f"{value:.3g}" for value in values]
    return shown[0] if len(shown) < 3 else f"{shown[0]} ({shown[1]} to {shown[2]})"


def _metadata(found: Record) -> str:
    """Return the metadata that the hub reads, in YAML: JSON is YAML too, and leaves no text outside of quotes."""
    task = PIPELINES.get(found["run"]["head"], found["run"]["head"])
    method = found["run"]["spec"].method.name
    fields: Record = {
        "library_name": "transformers",
        "pipeline_tag": task,
        "tags": ["federated-learning", "tessera", method],
    }
    results = [
        {
            "task": {"type": task},
            "dataset": {"name": one["measured_on"], "type": one["dataset"]},
            "metrics": [
                {
                    "type": one["score"],
                    "value": one["all"]["value"],
                    "name": f"{one['score']} {_interval(one['all'])}",
                }
            ],
        }
        for one in found["results"]
    ]
    if results:
        fields["model-index"] = [{"name": found["run"]["name"], "results": results}]
    return "".join(
        f"{key}: {json.dumps(mapped(fit_to_show, value), ensure_ascii=False)}\n" for key, value in fields.items()
    )


def _interval(one: Record) -> str:
    return "" if one["low"] is None else f"(95 % interval {one['low']:.3f} to {one['high']:.3f})"


# ---------------------------------------------------------------- sentences


def concerns(found: Record) -> Iterator[str]:
    """Yield the points that a reader should weigh before the model is used, the gravest first."""
    yield from _of_run(found["run"], found["version"])
    yield from _of_sites(found)
    run, number = found["run"], found["version"]["number"]
    yield from _of_results(found["results"], run["id"])
    for attack in found["attacks"]:
        if attack["succeeded"]:
            yield f"The membership attack of the run {attack['run_name']} did better than a guess: see below."
    if not any(one["figures"] for attack in found["attacks"] for one in attack["figures"]):
        yield (
            "No membership attack was made on this model with the run's data: it was not tried whether the model "
            f"shows whose records it was trained on. To try it: tessera run attack --from {run['id']}@{number}"
        )
    if number and not (run["spec"].privacy or run["spec"].client_privacy):
        yield (
            "The run has no differential privacy: no mathematical bound limits what the model reveals about a record."
        )


def _of_run(run: Record, version: Record) -> Iterator[str]:
    if run["state"] != "completed":
        yield f"The run is {run['state']}, and not completed{': ' + run['reason'] if run['reason'] else '.'}"
    if version["number"] < run["latest"]:
        yield f"The run has later versions; the latest is {run['latest']}."
    if version["coverage"] and version["coverage"]["low"]:
        yield (
            f"This version rests on {Coverage.model_validate(version['coverage']).words}: on fewer examples than the "
            "run asks for, or without one of the largest sites in most rounds."
        )
    yield from version["warnings"]


def _of_sites(found: Record) -> Iterator[str]:
    version, sites, origin = found["version"], found["sites"], found["origin"]
    if origin and origin["version"] is None:
        yield f"The versions were merged again from updates of the run {origin['run']}: its dossier has the sites."
        return
    if origin:
        yield (
            f"The run began with version {origin['version']} of the run {origin['run']}, whose dossier says which "
            "sites that rests on."
        )
    cohort = found["run"]["spec"].cohort
    for name in sorted({*(cohort.sites or ()), *cohort.require} - {site["site"] for site in sites}):
        yield f"The run names {name}, which has not offered this data."
    for site, reason in version["left_out"].items():
        yield f"{site} was asked for this version and is not part of it: {reason}."
    for site in sites:
        if site["standing"] in ("withdrawn", "left the study") and site["versions_merged"]:
            yield f"{site['site']} has {site['standing']}. Its influence on this version remains."
        elif version["number"] and not site["versions_merged"] and site["site"] not in version["left_out"]:
            yield f"{site['site']} took no part up to this version{': ' + site['reason'] if site['reason'] else ''}."


def _of_results(results: Sequence[Record], run: str) -> Iterator[str]:
    if not results:
        yield "This version was not measured: how good it is, is not known."
    for result in results:
        for kind, name, below in far_below(result):
            where = name if kind == "site" else f"the subgroup {result['subgroup_column']} = {name}"
            said = f"{score(below, result['score'])} against {score(result['all'], result['score'])}"
            there = "" if result["run"] == run else f" in the run {result['run_name']}"
            yield f"For {where} the {result['score']} is clearly lower than over all{there}: {said}."


def promises(found: Record) -> Iterator[str]:
    """Yield the limits on the information about a person or a site, in the run's settings and at the sites."""
    spec: RunSpec = found["run"]["spec"]
    if spec.privacy:
        yield (
            "Differential privacy, a mathematical bound on the information in all updates of a site about one "
            f"{'group of records, such as all of one patient' if spec.privacy.unit == 'group' else 'record'}: "
            f"{spec.privacy.at_workers}. A smaller epsilon protects more. The table of sites has the part that was "
            "spent up to this version."
        )
    if spec.client_privacy:
        spent = found["version"]["site_epsilon"]
        yield (
            "Differential privacy for each site as a whole: all versions together reveal about one site's updates at "
            f"most {spec.client_privacy.bound}; up to this version, epsilon {spent or 0:.3g}."
        )
    if not (spec.privacy or spec.client_privacy):
        yield "No differential privacy. Records stayed at the sites, but a model can reveal facts about some of them."
    if spec.secure_sums:
        yield (
            f"Secure sums: the coordinator could read only sums over {spec.secure_sums.quorum} sites or more, opened "
            f"with the help of {', '.join(spec.secure_sums.helpers)}."
        )
    else:
        yield "No secure sums: the operators of the coordinator could read the update of each single site."
    airlocks = [site["site"] for site in found["sites"] if site["airlock"]]
    if airlocks:
        yield f"By their own settings, a person releases each update at: {', '.join(airlocks)}."
