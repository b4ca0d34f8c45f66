"""Environment variables that misspell a setting, and those that do not."""

from __future__ import annotations

import pytest

from tessera.coordinator.settings import CoordinatorSettings
from tessera.shared.client.client import Client
from tessera.shared.environment import COMMANDS, refuse_misspelt, unknown
from tessera.shared.near_names import MISSPELT, did_you_mean, nearest
from tessera.shared.problems import Invalid
from tessera.worker.settings import WorkerSettings
from tests.support.cli import tessera

COORDINATOR = frozenset(field.upper() for field in CoordinatorSettings.model_fields)
WORKER = frozenset(f"WORKER_{field}".upper() for field in WorkerSettings.model_fields)


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("TESSERA_PROT", "TESSERA_PORT"),
        ("tessera_behind_proxi", "TESSERA_BEHIND_PROXY"),
        ("TESSERA_CLIENT_CA", "TESSERA_TLS_CLIENT_CA"),
        ("TESSERA_TLS_CRT", "TESSERA_TLS_CERT"),
        ("TESSERA_TOKENFILE", "TESSERA_TOKEN_FILE"),
        ("TESSERA_CHECKOUT", None),
        ("TESSERA_", None),
    ],
)
def test_a_misspelt_variable_is_refused_with_the_setting_and_an_operators_own_is_not(
    variable: str, meant: str | None
) -> None:
    assert list(unknown([variable, "PATH", "TESSERA_TEST_PORT"], COORDINATOR)) == [(variable, meant)]
    if meant:
        with pytest.raises(Invalid, match=f"{variable} is no setting; did you mean {meant}\\?"):
            refuse_misspelt({variable: "8475"}, COORDINATOR)
    else:
        refuse_misspelt({variable: "x"}, COORDINATOR)


def test_each_side_lets_the_variables_of_the_others_pass() -> None:
    sides = (COMMANDS, COORDINATOR, WORKER)
    for settings in sides:
        resembled = {name: nearest(name, settings | COMMANDS, MISSPELT) for side in sides for name in side}
        assert all(near is None or near == name for name, near in resembled.items())


def test_commands_and_notebooks_refuse_a_misspelt_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = tessera("run", "list", TESSERA_ULR="http://127.0.0.1:9")
    assert (answer.returncode, "did you mean TESSERA_URL?" in answer.stderr) == (2, True)
    monkeypatch.setenv("TESSERA_CA_BUNDEL", "ca.pem")
    with pytest.raises(Invalid, match="did you mean TESSERA_CA_BUNDLE"):
        Client.from_environment()


def test_the_coordinator_refuses_a_misspelt_variable_without_its_value() -> None:
    answer = tessera("coordinator", "config", "show", TESSERA_PROT="8475")
    assert answer.returncode == 2
    assert answer.stderr == (
        "TESSERA_PROT is no setting; did you mean TESSERA_PORT? "
        "Correct it, or give a variable of your own a name that resembles no setting.\n"
    )


def test_a_suggestion_is_the_nearest_name_or_a_list_of_few() -> None:
    assert did_you_mean("alpah", ("alpha", "count")) == "; did you mean `alpha`?"
    assert did_you_mean("zzz", ("b", "a")) == "; it can be a, b"
    assert did_you_mean("zzz", ()) == ""
    assert did_you_mean("?", [f"n{number}" for number in range(1000)]) == ""
