from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.walk import walk

FILES = {
    "runner.py": """
from tessera.worker.policy import Policy
from tessera.worker.fetch import fetched

class Runner:
    policy: Policy

    def run(self, task):
        self.policy.check(task)
        found = fetched(task.version)
        self.note(task)
        fetched(found)

    def note(self, task): ...
""",
    "policy.py": """
class Policy:
    def check(self, task):
        part = task.plan
        refuse(part)

def refuse(plan): ...
""",
    "fetch.py": """
from tessera.worker import policy

def fetched(version):
    for block in version.blocks:
        policy.refuse(block)
""",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "worker").mkdir()
    for name, text in FILES.items():
        (tmp_path / "worker" / name).write_text(text)
    return tmp_path


def test_a_parameter_and_its_parts_are_followed_in_the_order_of_the_calls(root: Path) -> None:
    made = walk(root, "worker/runner.py:Runner.run:task")
    # Within a file a stay is one; what `fetched` returned is no part of the task.
    assert made.stays == [f"worker/{name}.py" for name in ("runner", "policy", "fetch", "policy", "runner")]
    assert made.returns == 2
