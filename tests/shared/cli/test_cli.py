"""The command line by itself: what it finds, imports, refuses and says. Real processes, no coordinator."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tessera.shared.cli.admin import new_secret_file
from tessera.shared.cli.connection import Connection
from tessera.shared.client.lookup import only
from tessera.shared.client.run_file import read_spec
from tessera.shared.problems import Conflict, Fault, Invalid, NotFound, Problem, Unavailable, problem_from
from tessera.shared.terminal import output
from tessera.shared.terminal.output import show_problem
from tessera.shared.urls import PLAIN_HTTP
from tessera.shared.version import install_line
from tests.support.cli import NOWHERE, forked, process, tessera

SPEC = """
name = "trial"
dataset = "data"
rounds = 3
[method]
name = "fedfrozen"
[method.settings]
warmup_rounds = 1
"""


def without(*modules: str) -> list[str]:
    """A `tessera` in whose interpreter importing these modules fails as if they were not installed."""
    gone = f"import sys; sys.modules.update(dict.fromkeys({modules!r}))"
    return [sys.executable, "-c", f"{gone}; from tessera.shared.cli.main import main; main()"]


# ---------------------------------------------------------------- finding commands


def test_help_lists_every_command_and_imports_none() -> None:
    shown = process("--help", command=without("torch", "fastapi", "sqlalchemy", "httpx"))
    assert shown.returncode == 0, shown.stderr
    assert all(name in shown.stdout for name in ("admin", "coordinator", "model", "run", "worker"))


@pytest.mark.parametrize(
    ("command", "module", "extra"),
    [
        ("worker check --config FILE", "torch", "worker"),
        ("model --help", "safetensors", "worker"),
        ("coordinator migrate", "alembic", "coordinator"),
    ],
)
def test_a_missing_extra_is_named_in_one_line(tmp_path: Path, command: str, module: str, extra: str) -> None:
    file = tmp_path / "worker.toml"
    file.write_text(f'url = "{NOWHERE}"\nname = "w"\ntoken = "x"\nstate_dir = "s"\n[datasets.d]\nkind = "digits"\n')
    name, *words = command.replace("FILE", str(file)).split()
    answer = process(name, *words, command=without(module))
    assert (answer.returncode, answer.stderr) == (
        2,
        f"error: `tessera {name}` needs {module}, which is not installed: {install_line(extra)}\n",
    )


def test_the_page_of_commands_names_a_missing_extra() -> None:
    page = process("docs", "cli", command=without("safetensors"))
    assert (page.returncode, page.stderr) == (0, "")
    lacking = f"`tessera model` needs safetensors, which is not installed: {install_line('worker')}"
    assert f"## `tessera model`\n\n{lacking}\n\n## `tessera regional`\n" in page.stdout


def test_a_part_that_is_not_installed_is_named(tmp_path: Path) -> None:
    script = (
        "import sys, importlib.util as u\n"
        "class Gone:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.startswith('tessera.worker'):\n"
        "            raise ModuleNotFoundError(f'no {name}', name='tessera.worker')\n"
        "sys.meta_path.insert(0, Gone())\n"
        "find = u.find_spec\n"
        "u.find_spec = lambda name, package=None: None if name == 'tessera.worker' else find(name, package)\n"
        "from tessera.shared.cli.main import main; main()"
    )
    answer = process("worker", "run", command=[sys.executable, "-c", script])
    assert (answer.returncode, answer.stderr) == (
        2,
        "error: `tessera worker` is not part of this installation: it has no package 'worker'.\n",
    )


def test_a_command_of_our_own_that_does_not_import_is_not_hidden() -> None:
    answer = process("run", "list", command=without("tessera.shared.client.client"))
    assert "ModuleNotFoundError" in answer.stderr


def test_an_unknown_command_is_wrong_usage() -> None:
    answer = tessera("rnu")
    assert answer.returncode == 2
    assert "there is no command 'rnu'; did you mean `run`?" in answer.stderr


def test_the_version_is_told() -> None:
    answer = tessera("--version")
    assert (answer.returncode, answer.stdout.split()[0]) == (0, "tessera")


# ---------------------------------------------------------------- saying what is wrong


def test_a_problem_is_told_with_each_error_and_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    problem = Invalid("two are wrong", errors=[Fault(pointer="/a", detail="too [small]")], remedy="Mend it.")
    show_problem(problem, as_json=False)
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", "error: two are wrong\n  /a: too [small]\nMend it.\n")


def test_with_json_the_problem_document_goes_to_stdout() -> None:
    answer = tessera("run", "--url", "ftp://x", "list", "--json")
    document = json.loads(answer.stdout)
    assert (answer.returncode, document["code"]) == (2, "invalid")
    assert answer.stderr.startswith("error: 'ftp://x' is not a coordinator's URL")


def test_a_token_is_shown_to_no_other_machine_in_plain_http() -> None:
    elsewhere = {"TESSERA_URL": "http://192.0.2.1:8470", "TESSERA_TOKEN": "tessera_admin_x"}
    answer = tessera("run", "list", **elsewhere)
    assert answer.returncode == 2
    assert "is plain HTTP" in answer.stderr
    assert "TESSERA_PLAIN_HTTP=true" in answer.stderr
    Connection("https://192.0.2.1", "x", None).client().close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PLAIN_HTTP, "true")
        Connection("http://192.0.2.1", "x", None).client().close()


def test_a_run_file_that_is_not_there_is_wrong_usage(tmp_path: Path) -> None:
    file = str(tmp_path / "missing.toml")
    answer = tessera("run", "--url", NOWHERE, "create", file, "--model", str(tmp_path), "--json")
    assert (answer.returncode, json.loads(answer.stdout)["code"]) == (2, "invalid")
    assert "missing.toml; check the path" in answer.stderr


def test_a_spec_is_refused_before_the_coordinator_is_asked(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("robsut = {}\n" + SPEC.replace("rounds = 3", "rounds = -1") + "warmup = 2\n")
    answer = tessera("run", "--url", NOWHERE, "create", str(file), "--model", str(tmp_path))
    assert answer.returncode == 2
    assert "/rounds: must be at least 0" in answer.stderr
    assert "/robsut: unknown key; did you mean `robust`?" in answer.stderr
    assert "/method/settings/warmup: unknown key; did you mean `warmup_rounds`?" in answer.stderr
    assert "Traceback" not in answer.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["admin", "site", "add", "north hospital"], "'north hospital': must be up to 64 letters"),
        (["admin", "token", "create", "\u00e9", "--role", "viewer"], "'\u00e9': must be up to 64"),
        (["admin", "token", "create", "x", "--role", "site", "--site", "a b"], "Invalid value for '--site': 'a b'"),
        (
            ["admin", "token", "create", "x", "--role", "site"],
            "Invalid value for '--site': a token of role site needs it",
        ),
        (["admin", "token", "create", "x", "--role", "viewer", "--site", "a"], "Invalid value for '--site'"),
        (
            ["run", "create", "run.toml", "--model", "m", "--idempotency-key", "\u00e9"],
            "Invalid value for '--idempotency-key'",
        ),
    ],
)
def test_a_name_that_cannot_be_sent_is_wrong_usage(arguments: list[str], named: str) -> None:
    answer = tessera(*arguments, TESSERA_URL=NOWHERE)
    assert answer.returncode == 2
    assert named in answer.stderr
    assert "Traceback" not in answer.stderr


def test_an_unreadable_token_file_is_named() -> None:
    answer = tessera("admin", "--token-file", "/no/such/token", "status")
    assert answer.returncode == 2
    assert "the token in /no/such/token cannot be read" in answer.stderr


def test_an_interrupt_ends_with_130() -> None:
    script = "import tessera.shared.cli.main as m, signal\nfrom tessera.shared.cli import connection\n"
    script += "connection.Connection.client = lambda *_: signal.raise_signal(signal.SIGINT)\nm.main()"
    answer = forked(script, "run", "list", module="tests.support.code")
    assert (answer.returncode, "Traceback" in answer.stderr) == (130, False)


# ---------------------------------------------------------------- reading what people write


def spec_file(folder: Path, text: str = SPEC) -> Path:
    file = folder / "run.toml"
    file.write_text(text)
    return file


def test_settings_change_a_spec_by_dotted_keys(tmp_path: Path) -> None:
    changes = ["rounds=7", "method.settings.scope=v_head", "cohort.sites=['a', 'b']", "name='x'"]
    spec = read_spec(spec_file(tmp_path), changes)
    assert spec == {
        "name": "x",
        "dataset": "data",
        "rounds": 7,
        "method": {"name": "fedfrozen", "settings": {"warmup_rounds": 1, "scope": "v_head"}},
        "cohort": {"sites": ["a", "b"]},
    }


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ("method.settings.scope=nothing", "/method/settings/scope"),
        ("method.settings.warmup=1", "/method/settings/warmup"),
        ("cohort.quorum=0", "/cohort/quorum"),
        ("epochs=2", "/epochs"),
        ("model=x", "/model"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path: Path, change: str, pointer: str) -> None:
    with pytest.raises(Invalid) as refused:
        read_spec(spec_file(tmp_path), [change])
    assert [fault.pointer for fault in refused.value.errors] == [pointer]


@pytest.mark.parametrize("change", ["rounds", "=3", ".a=3", "name.first=x"])
def test_a_setting_that_is_not_key_and_value_is_refused(tmp_path: Path, change: str) -> None:
    with pytest.raises(Invalid, match="--set"):
        read_spec(spec_file(tmp_path), [change])


def test_a_method_that_only_the_coordinator_has_is_left_to_it(tmp_path: Path) -> None:
    assert read_spec(spec_file(tmp_path), ["method.name=elsewhere"])["method"]["name"] == "elsewhere"


def find(named: str) -> tuple[str, str]:
    among = [("ab12", "one"), ("ab34", "two"), ("cd56", "ab34")]
    return only("run", named, among, lambda pair: pair[0], lambda pair: pair[1])


def test_an_abbreviation_or_a_name_finds_the_only_one() -> None:
    assert (find("ab1"), find("two"), find("c")) == (("ab12", "one"), ("ab34", "two"), ("cd56", "ab34"))


def test_an_abbreviation_of_several_names_them() -> None:
    with pytest.raises(Invalid, match="'ab' could be any of 2 runs") as refused:
        find("ab")
    assert [fault.pointer for fault in refused.value.errors] == ["ab12", "ab34"]
    assert "Give the id" in refused.value.advice


@pytest.mark.parametrize("named", ["", "zz", "AB12"])
def test_nothing_is_found_for_what_is_not_there(named: str) -> None:
    with pytest.raises(NotFound, match="there is no run"):
        find(named)


@pytest.mark.parametrize(
    ("options", "variables", "told"),
    [
        (("--token-file", "FILE"), {"TESSERA_TOKEN": "\u00fc"}, "the token in FILE cannot be read"),
        (("--token", "\u00fc", "--token-file", "FILE"), {}, "the token has characters that no token has"),
        ((), {"TESSERA_TOKEN": "\u00fc", "TESSERA_TOKEN_FILE": "FILE"}, "the token has characters that no token has"),
    ],
)
def test_a_token_file_on_the_command_line_is_stronger_than_a_token_in_the_environment(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    variables: dict[str, str],
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = tessera("run", *options, "list", TESSERA_URL=NOWHERE, **variables)
    assert (answer.returncode, told in answer.stderr) == (2, True), answer.stderr


def test_a_secret_goes_into_a_new_file_of_its_owner_alone(tmp_path: Path) -> None:
    with new_secret_file(tmp_path / "token") as store:
        store("s3cret")
        # It is there before the request that makes it valid.
        assert (tmp_path / "token").read_text() == "s3cret\n"
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    with pytest.raises(Invalid, match="File exists; no token was issued"), new_secret_file(tmp_path / "token"):
        pass


def test_the_place_of_a_secret_that_never_came_is_removed(tmp_path: Path) -> None:
    with pytest.raises(NotFound), new_secret_file(tmp_path / "token"):
        raise NotFound("no such site")
    assert not (tmp_path / "token").exists()


def test_a_secret_stays_if_no_answer_tells_whether_it_is_valid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def rotate(file: Path, problem: Problem) -> None:
        with new_secret_file(file) as store:
            store("s3cret")
            raise problem

    with pytest.raises(Unavailable):
        rotate(tmp_path / "token", Unavailable("no answer came"))
    assert (tmp_path / "token").read_text() == "s3cret\n"
    assert "not known whether" in capsys.readouterr().err
    refused = problem_from(Conflict("token 'reader' is not valid any more").document())
    with pytest.raises(Conflict):
        rotate(tmp_path / "other", refused)
    assert not (tmp_path / "other").exists()


HOSTILE = "\x1b]0;title\x07\x1b[31mred\x9b2J\u202egnp.exe\r\x00"


def test_no_text_of_a_worker_moves_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    output.out().print(output.table((HOSTILE, "b"), [(HOSTILE, "ü \u00a0 x")]))
    output.complain(HOSTILE)
    output.note(HOSTILE)
    output.show_problem(
        Invalid(HOSTILE, errors=[Fault(pointer=HOSTILE, detail=HOSTILE)], remedy=HOSTILE), as_json=False
    )
    told = "".join(capsys.readouterr())
    assert not set(told) & set("\x1b\x07\x9b\u202e\r\x00")
    assert "\ufffd]0;title\ufffd\ufffd[31mred\ufffd2J\ufffdgnp.exe" in told
    assert "ü \u00a0 x" in told
