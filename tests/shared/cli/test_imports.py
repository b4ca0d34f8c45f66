"""What takes seconds to import is imported only by commands that need it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

from tests.support.cli import COMMAND, HEAVY, NOWHERE, environment, process

# Walks the whole tree of commands in one process, which imports no more than the last of them would.
PROGRAM = """
import json, os, sys
from typer.main import get_command
from typer.testing import CliRunner
from tessera.shared.cli.main import app

lines, heavy = json.loads(sys.argv[1]), set(json.loads(sys.argv[2]))
found, codes, tree = {}, {}, get_command(app)

def ask(*words, **env):
    done = CliRunner().invoke(app, words, env=env, prog_name="tessera")
    line = " ".join(words) or env["COMP_WORDS"]
    codes[line] = done.exit_code
    if new := heavy.intersection(sys.modules) - set().union(*found.values()):
        found[line] = sorted(new)

def walk(command, words):
    for wrong in ("--help", "--no-such-option"):
        ask(*words, wrong)
    if hasattr(command, "list_commands"):
        context = tree.make_context("tessera", [*words, "x"], resilient_parsing=True)
        for name in command.list_commands(context):
            inner = tree.resolve_command(context, [name])[1] if not words else command.get_command(context, name)
            walk(inner, [*words, name])
    else:
        line = ["tessera", *words, "--"]
        ask(_TESSERA_COMPLETE="complete_bash", COMP_WORDS=" ".join(line), COMP_CWORD=str(len(line) - 1))

walk(tree, [])
for line in lines:
    ask(*line)
print(json.dumps({"found": found, "codes": codes}))
"""


def test_a_command_without_tensors_or_tables_imports_neither_torch_nor_a_database(tmp_path: Path) -> None:
    config, missing = str(tmp_path / "worker.toml"), str(tmp_path / "missing.toml")
    Path(config).write_text(
        f'url = "{NOWHERE}"\nname = "w"\ntoken = "tessera_site_x"\nstate_dir = "{tmp_path}/state"\n'
        '[datasets.digits]\nkind = "digits"\n'
    )
    of_worker = [
        ["inbox"], ["airlock"], ["roster"], ["ledger"], ["adopt"], ["rotate"], ["config", "show"], ["cache", "list"],
        ["cache", "remove", "x"], ["approve", "x"], ["decline", "x", "--reason", "y"], ["release", "--all"],
        ["withhold", "x"],
    ]  # fmt: skip
    lines = [["worker", *line, "--config", config] for line in of_worker]
    lines += [["worker", line, "--config", missing] for line in ("run", "check", "doctor")]
    lines += [["worker", "join", "http://example.com", "--site", "x", "--config", missing], ["worker", "status"]]
    lines += [["data", line, missing] for line in ("show", "init", "split")]
    # Of another group: its commands are named without importing them.
    lines += [["serve"], ["worker", "migrate"]]
    lines += [["simulate", missing], ["compare", str(tmp_path), missing], ["model", "blocks", missing]]
    lines += [["model", "merge", missing, missing], ["audit", "verify", "--config", config]]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(lines), json.dumps(HEAVY)],
        env=environment(), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["found"] == {}
    codes = answer["codes"]
    assert {codes[line] for line in codes if line.endswith("--help")} == {0}
    assert {codes[line] for line in codes if line.endswith("--no-such-option")} == {2}
    # The whole tree was walked.
    assert {"worker cache add --help", "run create --help", "admin join approve --help"} <= codes.keys()


def test_an_interrupt_during_an_import_prints_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    ended = process("run", "list", command=COMMAND, PYTHONPATH=str(tmp_path))
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, "", "stopped\n")
