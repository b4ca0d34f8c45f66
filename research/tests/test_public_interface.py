"""Studies use Tessera as any project does: they import what its documents describe."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.paths import ROOT

PUBLIC = {
    "tessera",
    # docs/reference: the client and the API's messages.
    "tessera.shared.client.client",
    "tessera.shared.model.spec",
    "tessera.shared.problems",
    "tessera.shared.run_settings",
    # docs/writing-a-method.md.
    "tessera.shared.methods.base",
    "tessera.shared.methods.registry",
    "tessera.shared.model.blocks",
    "tessera.shared.model.selectors",
    "tessera.shared.tensors.lazy",
    # docs/simulating.md and docs/data.md.
    "tessera.worker.data.dataset",
    "tessera.simulation",
    "tessera.simulation.comparison.statistics",
}
"""Beside the modules of `tessera.shared.api`."""
INTERNAL = {
    # Models as a worker lays them out, with prompts and adapters: attacks craft them, and studies measure versions.
    "tessera.shared.updates.model_folder": "evidence",
    "tessera.worker.model.block_map": "attacks evidence small_tasks",
    "tessera.worker.model.build": "attacks evidence small_tasks",
    "tessera.worker.model.forward": "attacks evidence",
    "tessera.worker.model.prompts": "evidence",
    "tessera.worker.training.optimization.image_features": "evidence",
    "tessera.worker.training.optimization.precision": "evidence",
    # The product's own bytes and memory are counted.
    "tessera.shared.aggregation.mean": "evidence",
    "tessera.shared.tensors.dtypes": "evidence small_tasks",
    "tessera.shared.updates": "evidence",
    "tessera.shared.updates.codecs": "evidence small_tasks",
    "tessera.shared.updates.update_file": "evidence small_tasks",
    "tessera.worker.model.device_memory": "evidence",
    "tessera.worker.model.four_bits": "evidence",
    # The product's own accounting is printed, or predicts an audit.
    "tessera.worker.privacy.accountant": "attacks small_tasks",
    "tessera.worker.state.privacy_ledger": "small_tasks",
    # Methods and their metrics are varied, or read again.
    "tessera.shared.methods.fednova": "evidence",
    "tessera.shared.methods.layer_choice": "evidence",
    "tessera.shared.methods.pfeddc": "evidence",
    "tessera.shared.methods.promptfl": "evidence",
    "tessera.shared.methods.safl_settings": "evidence",
    "tessera.shared.metrics.selections": "evidence",
    # Sites' data are divided, and pixels converted, as the product does.
    "tessera.worker.data.normalization": "evidence",
    "tessera.worker.data.partition.division": "small_tasks",
    "tessera.worker.data.partition.schemes": "evidence small_tasks",
    "tessera.worker.data.registry": "small_tasks",
}
"""What has no public way yet, with the studies that use it. Do without before you add one."""
STUDIES = ("attacks", "common", "controls", "evidence", "linear_attention", "rivals", "small_tasks")


def imported(study: str) -> Iterator[str]:
    for path in (ROOT / study).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                yield node.module
            elif isinstance(node, ast.Import):
                yield from (each.name for each in node.names)


@pytest.mark.parametrize("study", STUDIES)
def test_a_study_imports_public_modules_and_those_that_are_listed_for_it(study: str) -> None:
    used = {name for name in imported(study) if name.partition(".")[0] == "tessera"}
    internal = {name for name in used if name not in PUBLIC and not name.startswith("tessera.shared.api.")}
    assert internal == {name for name, studies in INTERNAL.items() if study in studies.split()}


@pytest.mark.parametrize("study", STUDIES)
def test_a_study_needs_no_folder_of_the_product_s_checkout(study: str) -> None:
    above = {name.partition(".")[0] for name in imported(study)}
    assert above & {"benchmarks", "examples", "tests", "coordinator", "shared", "worker", "migrations"} == set()
