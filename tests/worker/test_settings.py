"""A worker's settings: read from a file and the environment, and refused by the name of what is wrong."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from tessera.coordinator.settings import CoordinatorSettings
from tessera.shared.schema import TokenRole
from tessera.worker.cli.worker import app
from tessera.worker.deltas import check_deltas
from tessera.worker.governance.policy import Allowance, Policy
from tessera.worker.inventory import datasets_of, device_of, devices_of, inventory_of
from tessera.worker.settings import SettingsError, WorkerSettings, effective_settings, read_settings, token_of
from tessera.worker.stores import mappings_of
from tests.support.cli import forked, process
from tests.support.coordinator import LiveCoordinator
from tests.support.paths import ROOT

GOOD = """
url = "http://127.0.0.1:9"
token = "tsr_secret"
name = "north-1"
state_dir = "state"

[datasets.digits]
kind = "digits"
part = { scheme = "dirichlet", count = 3, index = 1 }

[datasets.held-out]
kind = "digits"
split = "test"
"""


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("TESSERA_")]:
        monkeypatch.delenv(name)


def written(folder: Path, text: str) -> Path:
    path = folder / "worker.toml"
    path.write_text(text)
    return path


def test_a_byte_order_mark_before_settings_and_tokens_is_not_read(tmp_path: Path) -> None:
    mark = "\ufeff"
    (tmp_path / "token").write_text(f"{mark}tsr_secret\n", encoding="utf-8")
    text = GOOD.replace('token = "tsr_secret"', f'token_file = "{tmp_path / "token"}"')
    path = tmp_path / "worker.toml"
    path.write_text(mark + text, encoding="utf-8")
    assert token_of(read_settings(path)) == "tsr_secret"
    assert effective_settings(path) == effective_settings(written(tmp_path, text))


def test_a_size_may_have_its_unit_in_each_setting_of_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a run's `upload_budget` may."""
    policy = [name for name in Policy.model_fields if name.endswith("_bytes")]
    text = 'cache_bytes = "3 GB"\n' + GOOD + "\n[policy]\n" + "".join(f'{name} = "50 MB"\n' for name in policy)
    settings = read_settings(written(tmp_path, text))
    assert settings.cache_bytes == 3_000_000_000
    assert {getattr(settings.policy, name) for name in policy} == {50_000_000}
    assert len(policy) >= 3
    own = [name for name in CoordinatorSettings.model_fields if name.endswith("_bytes")]
    for name in own:
        # Of the memory of bodies, less is refused.
        value = "16 MiB" if name == "body_memory_bytes" else "128 KiB"
        monkeypatch.setenv(f"TESSERA_{name.upper()}", value)
    assert {getattr(CoordinatorSettings(), name) for name in own} == {1 << 17, 1 << 24}


def refusal(folder: Path, text: str) -> str:
    with pytest.raises(SettingsError) as refused:
        read_settings(written(folder, text))
    return str(refused.value)


def test_a_plain_file_gives_settings_with_safe_defaults(tmp_path: Path) -> None:
    settings = read_settings(written(tmp_path, GOOD))
    assert settings.datasets["held-out"].options == {"split": "test"}
    assert settings.cache_bytes == 20 * 2**30
    assert settings.poll_seconds == 25
    assert token_of(settings) == "tsr_secret"
    assert "tsr_secret" not in repr(settings)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("name =", "nmae =", "nmae: unknown key; did you mean `name`?"),
        ("[datasets.", "[dataset.", "dataset: unknown key; did you mean `datasets`?"),
        ("index = 1", "index = 5", "datasets.digits.part: index 5 is not below count 3"),
        (", index = 1", "", "datasets.digits.part: index: give this site's part, from 0 to 2"),
        ("scheme =", "held_out = 1, scheme =", "datasets.digits.part.held_out: unknown key"),
        ('"north-1"', '"north 1"', "name: "),
        (
            "[datasets.digits]",
            "[policy]\nmax_epoch = 3\n[datasets.digits]",
            "policy.max_epoch: unknown key; did you mean `max_epochs`?",
        ),
        ("[datasets.digits]", "[policy]\nhours = []\n[datasets.digits]", "policy.hours: is empty; leave it out to"),
        ('"http://127.0.0.1:9"', '"127.0.0.1"', "url: "),
        ('token = "tsr_secret"', "", "give token_file"),
        ('state_dir = "state"', 'state_dir = "state"\ndevice = "tpu"', "device: "),
        ('state_dir = "state"', "state_dir = ", "is not TOML"),
    ],
)
def test_a_wrong_key_is_named(tmp_path: Path, old: str, new: str, told: str) -> None:
    found = refusal(tmp_path, GOOD.replace(old, new))
    assert told in found
    assert "tsr_secret" not in found


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        (
            f"never_send = {[f'block.{number}' for number in range(65)]}",
            "never_send: must have 64 or fewer entries",
        ),
        (f"never_send = ['{'x' * 257}']", "never_send.0: must have at most 256 characters"),
        (
            f"may_send = {{include = [{{names = {[f'b{number}' for number in range(64)]}}}]}}",
            "patterns: never_send, never_send_if_present and may_send have 65 patterns and conditions together",
        ),
        (f"models = {[f'model-{number}' for number in range(257)]}", "models: must have 256 or fewer entries"),
        (f"orchestrators = {[f'o{number}' for number in range(257)]}", "orchestrators: must have 256 or fewer "),
        (f"orchestrators = ['{'x' * 129}']", "orchestrators.0: must have at most 128 characters"),
    ],
    ids=lambda value: value.partition(":")[0] if ": " in value else "",
)
def test_a_policy_that_claims_cannot_carry_is_refused(tmp_path: Path, rule: str, told: str) -> None:
    found = refusal(tmp_path, f"{GOOD}\n[policy]\n{rule}\n")
    assert f"policy: {told}" in found
    assert "have no room for more of it" in found


def test_a_limit_of_time_that_no_private_task_could_keep_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TESSERA_WORKER_DURATION_QUANTUM_SECONDS", raising=False)
    limit = f"{GOOD}\n[policy]\nmax_task_seconds = "
    found = refusal(tmp_path, f"{limit}4\n")
    assert "policy.max_task_seconds is 4: tasks that wait for duration_quantum_seconds would all fail" in found
    assert "set it to 16 or more" in found
    assert read_settings(written(tmp_path, f"{limit}16\n")).duration_quantum_seconds == 16


def test_a_token_is_shown_to_no_other_machine_in_plain_http_unless_that_is_said_to_be_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = GOOD.replace("127.0.0.1:9", "tessera.example")
    assert "url: http://tessera.example is plain HTTP" in refusal(tmp_path, elsewhere)
    monkeypatch.setenv("TESSERA_PLAIN_HTTP", "true")
    assert read_settings(written(tmp_path, elsewhere)).url == "http://tessera.example"


def test_a_file_in_another_encoding_is_named(tmp_path: Path) -> None:
    path = tmp_path / "worker.toml"
    path.write_bytes(GOOD.replace("north-1", "närd").encode("latin-1"))
    with pytest.raises(SettingsError, match=r"worker\.toml is not TOML: byte \d+ is not UTF-8; save"):
        read_settings(path)


def test_the_environment_wins_over_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSERA_WORKER_NAME", "south-2")
    monkeypatch.setenv("TESSERA_WORKER_POLICY__MAX_EPOCHS", "2")
    settings = read_settings(written(tmp_path, GOOD + "[policy]\nnever_send = ['head*']\n"))
    assert settings.name == "south-2"
    assert settings.policy.max_epochs == 2
    assert settings.policy.never_send == ("head*",)


@pytest.mark.parametrize(
    ("variable", "told"),
    [
        ("TESSERA_WORKER_NMAE", "TESSERA_WORKER_NMAE: no such setting; did you mean `TESSERA_WORKER_NAME`?"),
        ("TESSERA_WORKR_NAME", "did you mean TESSERA_WORKER_NAME?"),
        ("TESSERA_WORKER_POLICY__MAX_EPOCS", "POLICY__MAX_EPOCS: unknown key; did you mean `max_epochs`?"),
    ],
)
def test_a_misspelt_variable_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, told: str
) -> None:
    monkeypatch.setenv(variable, "tsr_hidden")
    found = refusal(tmp_path, GOOD)
    assert told in found
    assert "tsr_hidden" not in found


def test_what_is_exported_for_the_command_line_is_not_the_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESSERA_URL", "https://elsewhere.example")
    monkeypatch.setenv("TESSERA_TOKEN", "tessera_admin_secret")
    settings = read_settings(written(tmp_path, GOOD))
    assert (settings.url, token_of(settings)) == ("http://127.0.0.1:9", "tsr_secret")


@pytest.mark.parametrize("token", ["tsr_s\u00e9cret", "tsr_\\u0007", " "])
def test_a_token_that_cannot_be_sent_is_refused_and_not_shown(tmp_path: Path, token: str) -> None:
    settings = read_settings(written(tmp_path, GOOD.replace("tsr_secret", token)))
    with pytest.raises(SettingsError, match="token: the value") as refused:
        token_of(settings)
    assert "tsr_" not in str(refused.value)


def test_the_token_may_lie_in_a_file_of_its_own(tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text("tsr_other\n")
    settings = read_settings(written(tmp_path, GOOD.replace('token = "tsr_secret"', f'token_file = "{secret}"')))
    assert token_of(settings) == "tsr_other"
    secret.write_text("\n")
    with pytest.raises(SettingsError, match=r"token_file: .* is empty"):
        token_of(settings)


def test_data_sets_that_the_policy_withholds_are_not_loaded(tmp_path: Path) -> None:
    settings = read_settings(written(tmp_path, GOOD + "[policy]\ndatasets = ['held-out']\n"))
    assert {name: dataset.examples for name, dataset in datasets_of(settings.sources).items()} == {"held-out": 360}


def test_a_wrong_option_of_a_data_set_is_named_by_its_place(tmp_path: Path) -> None:
    settings = read_settings(written(tmp_path, GOOD.replace('split = "test"', 'splt = "test"')))
    with pytest.raises(SettingsError, match=r"datasets\.held-out\.splt: "):
        datasets_of(settings.sources)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_mapping_file_is_read_by_the_model_type_that_it_describes(tmp_path: Path) -> None:
    mapping = tmp_path / "mapping.toml"
    mapping.write_text('model_type = "convbert"\n[[tensors]]\nnames = "*.query.*"\nrole = "query"\n')
    settings = read_settings(written(tmp_path, f'mappings = ["{mapping}"]\n' + GOOD))
    assert mappings_of(settings.mappings)["convbert"].model_type == "convbert"
    with pytest.raises(SettingsError, match="two files describe the same model type"):
        mappings_of((mapping, mapping))
    with pytest.raises(SettingsError, match=r"mappings: .*nowhere"):
        mappings_of((tmp_path / "nowhere.toml",))


def test_a_gpu_that_is_not_there_is_refused_and_auto_does_without(tmp_path: Path) -> None:
    settings: WorkerSettings = read_settings(written(tmp_path, GOOD))
    assert device_of(settings.device) == torch.device("cpu")
    with pytest.raises(SettingsError, match="device: there is no cuda:1 here, of 0"):
        device_of("cuda:1")


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ('device = "cpu"\ndevices = 2', ("cpu", "cpu")),
        ('devices = ["cpu", "cpu", "cpu"]', ("cpu", "cpu", "cpu")),
        ("devices = 1", ("cpu",)),
    ],
)
def test_devices_that_train_together_are_each_named(tmp_path: Path, asked: str, found: tuple[str, ...]) -> None:
    settings = read_settings(written(tmp_path, f"{asked}\n{GOOD}"))
    assert devices_of(settings) == tuple(map(torch.device, found))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ('devices = "all"', "devices: all GPUs are asked for and 0 are here"),
        ("devices = 2", "devices: 2 GPUs are asked for and 0 are here: lower devices, or set device to cpu"),
        ('devices = ["cuda:0", "cuda:1"]', "device: there is no cuda:0 here"),
        ('device = "cpu"\ndevices = ["cpu", "cpu"]', "device and devices name devices both"),
        ('device = "cuda:1"\ndevices = 2', "devices: there is one cuda:1: leave device or devices out"),
        ("devices = []", "devices: name either GPUs or cpu, at least one"),
    ],
)
def test_devices_that_are_not_there_are_refused(tmp_path: Path, asked: str, told: str) -> None:
    with pytest.raises(SettingsError, match=told):
        devices_of(read_settings(written(tmp_path, f"{asked}\n{GOOD}")))


def test_check_lists_data_sets_and_says_that_nobody_answers(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["check", "--config", str(written(tmp_path, GOOD))])
    assert result.exit_code == 1
    assert "held-out: 360 examples" in result.output
    assert "http://127.0.0.1:9 does not answer" in result.output


@pytest.mark.parametrize(
    ("role", "site", "code", "told"),
    [
        ("site", "a", 0, "answers: version"),
        ("admin", None, 3, "does not admit the token: this needs a token of role site; yours has role admin"),
        (None, None, 3, "does not admit the token: this token is not known here"),
    ],
)
def test_check_tries_the_token(
    coordinator: LiveCoordinator, tmp_path: Path, role: TokenRole | None, site: str | None, code: int, told: str
) -> None:
    token = coordinator.token(role, site) if role else "tsr_wrong"
    text = GOOD.replace("http://127.0.0.1:9", coordinator.url).replace("tsr_secret", token)
    result = CliRunner().invoke(app, ["check", "--config", str(written(tmp_path, text))])
    assert (result.exit_code, told in result.output) == (code, True), result.output
    assert token not in result.output


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("", "removed 30 days after their last use"),
        ("keep_vaults_days = 1.5\n", "removed 1.5 days after their last use"),
        ('keep_vaults_days = "forever"\n', "kept for ever"),
    ],
)
def test_check_shows_the_rule_for_vaults_of_ended_runs(tmp_path: Path, setting: str, said: str) -> None:
    result = CliRunner().invoke(app, ["check", "--config", str(written(tmp_path, setting + GOOD))])
    assert f"those of ended runs are {said}" in result.output


NONE = "runs need no differential privacy; approval is not required; updates need no masks"
RULES = {
    "": [NONE],
    "[policy]\napprove_runs = true\nrequire_secure_sums = true\n": [
        "Updates leave only under masks, in runs with secure sums.",
        "runs need no differential privacy",
    ],
    "[privacy]\nepsilon = 900\ndelta = 1e-4\n": [
        f"On {name}, all runs together may spend epsilon 900 at delta 0.0001 (epsilon 900: no protection) for each "
        "example."
        for name in ("digits", "held-out")
    ]
    + ["approval is not required; updates need no masks"],
    "[policy.require_client_privacy]\nepsilon = 4\ndelta = 1e-5\ntotal_epsilon = 40\n": [
        "Runs that train need privacy of this site as a whole, in secure sums: at most epsilon 4 at delta 1e-05.",
        "Of this site as a whole, all runs together may spend epsilon 40 at delta 1e-05 (epsilon 40: no protection).",
        "runs need no differential privacy; approval is not required",
    ],
}


@pytest.mark.parametrize("text", RULES)
def test_check_shows_the_rules_of_privacy_or_that_there_are_none(tmp_path: Path, text: str) -> None:
    result = CliRunner().invoke(app, ["check", "--config", str(written(tmp_path, GOOD + text))])
    shown = [line.partition(" ")[2].strip() for line in result.output.splitlines() if line.startswith("privacy ")]
    assert shown == RULES[text]


FORTY = """
url = "http://127.0.0.1:9"
token = "tsr_secret"
name = "north-1"
state_dir = "state"
"""
DELTAS = {
    "policy.require_privacy.delta": "[policy.require_privacy]\nepsilon = 3\ndelta = 0.09\n",
    "policy.max_weekly_privacy.delta": "[policy.max_weekly_privacy]\nepsilon = 3\ndelta = 0.09\n",
    "policy.max_total_privacy.delta": "[policy.max_total_privacy]\nepsilon = 3\ndelta = 0.09\n",
    "privacy.delta": "[privacy]\nepsilon = 3\ndelta = 0.09\n",
    "datasets.scans.privacy.delta": "[datasets.scans.privacy]\nepsilon = 3\ndelta = 0.09\n",
}


@pytest.mark.parametrize("setting", DELTAS)
def test_a_delta_that_permits_the_release_of_whole_examples_is_refused_in_each_rule(
    tmp_path: Path, setting: str
) -> None:
    """Forty examples need 40^-1.1 = 0.017, as of a run: 0.016 is taken."""
    save_file({"pixel_values": torch.zeros(40, 1, 4, 4), "labels": torch.arange(40) % 2}, tmp_path / "scans")
    data = f'[datasets.scans]\nkind = "arrays"\nfile = "{tmp_path / "scans"}"\n'
    result = CliRunner().invoke(app, ["check", "--config", str(written(tmp_path, FORTY + data + DELTAS[setting]))])
    assert result.exit_code == 2
    said = f"a delta of 0.09 gives no guarantee for 40 examples: set {setting} to 0.017 or less"
    assert said in " ".join(result.output.split())
    settings = read_settings(written(tmp_path, FORTY + data + DELTAS[setting].replace("0.09", "0.016")))
    check_deltas(settings, inventory_of(settings.datasets, datasets_of(settings.sources)))


def test_a_delta_is_judged_by_the_number_of_what_it_protects(tmp_path: Path) -> None:
    columns = {"labels": torch.arange(40) % 2, "group": torch.arange(40) % 4}
    save_file({"pixel_values": torch.zeros(40, 1, 4, 4), **columns}, tmp_path / "scans")
    data = f'[datasets.scans]\nkind = "arrays"\nfile = "{tmp_path / "scans"}"\n'

    def judged(rules: str) -> None:
        settings = read_settings(written(tmp_path, FORTY + data + rules))
        check_deltas(settings, inventory_of(settings.datasets, datasets_of(settings.sources)))

    # Four groups need 4^-1.1 = 0.22, which is more than any delta may be.
    judged('[policy.require_privacy]\nepsilon = 3\ndelta = 0.09\nunit = "group"\n')
    others = "".join(f'site-{n} = "0000-{"0000-" * 6}0000"\n' for n in range(30))
    sums = f'[secure_sums]\nsite = "north"\n[secure_sums.roster]\n{others}'
    with pytest.raises(SettingsError, match=r"for 31 sites: set policy\.require_client_privacy\.delta to 0\.023"):
        judged("[policy.require_client_privacy]\nepsilon = 3\ndelta = 0.09\n" + sums)


def test_check_tells_the_same_as_json(tmp_path: Path) -> None:
    text = GOOD + "[policy]\ndatasets = ['held-out']\n"
    result = CliRunner().invoke(app, ["check", "--json", "--config", str(written(tmp_path, text))])
    told = json.loads(result.stdout)
    assert result.exit_code == 1
    assert told["datasets"] == {"digits": None, "held-out": 360}
    assert told["keep_vaults_days"] == 30
    assert told["privacy"] == [NONE]
    assert (told["coordinator"]["version"], told["coordinator"]["problem"]["code"]) == (None, "unavailable")


@pytest.mark.parametrize("command", ["run", "check"])
def test_methods_that_cannot_be_used_end_so_too(tmp_path: Path, command: str) -> None:
    path = written(tmp_path, GOOD.replace('"state"', f'"{tmp_path}"'))
    refused = forked("worker", command, "--config", str(path), TESSERA_METHODS=str(tmp_path / "none"))
    assert refused.returncode == 2
    assert f"error: TESSERA_METHODS names {tmp_path / 'none'}, which is not a folder" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize("command", ["run", "check"])
def test_bad_settings_end_with_one_line_and_a_code_of_their_own(tmp_path: Path, command: str) -> None:
    path = written(tmp_path, GOOD.replace("name =", "nmae ="))
    result = CliRunner().invoke(app, [command, "--config", str(path)])
    assert result.exit_code == 2
    assert "nmae: unknown key; did you mean `name`?" in result.output
    assert "Traceback" not in result.output


def test_a_budget_of_all_data_gives_way_to_a_data_set_s_own(tmp_path: Path) -> None:
    text = GOOD.replace("[datasets.held-out]", "privacy = { epsilon = 2.0, delta = 1e-6 }\n\n[datasets.held-out]")
    settings = read_settings(
        written(tmp_path, text + "\n[privacy]\nepsilon = 8.0\ndelta = 1e-5\nevaluations = true\n")
    )
    assert settings.allowances == {
        "digits": Allowance(epsilon=2.0, delta=1e-6),
        "held-out": Allowance(epsilon=8.0, delta=1e-5, evaluations=True),
    }
    assert read_settings(written(tmp_path, GOOD)).allowances == {}


OWN_KIND = GOOD.replace(
    '[datasets.digits]\nkind = "digits"\npart', '[datasets.digits]\nkind = "bars"\ncount = 30\npart'
)


@pytest.fixture
def kinds(tmp_path: Path) -> Path:
    """A folder with the kind of the documents."""
    (tmp_path / "kinds").mkdir()
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "data.md").read_text(), re.DOTALL)
    (tmp_path / "kinds" / "bars.py").write_text(code)
    (tmp_path / "kinds" / "_common.py").write_text("raise RuntimeError")
    return tmp_path / "kinds"


def test_a_worker_reads_a_kind_from_a_file_of_its_site(tmp_path: Path, kinds: Path) -> None:
    path = written(tmp_path, OWN_KIND.replace('"state"', f'"{tmp_path / "state"}"'))
    found = process("worker", "check", "--json", "--config", str(path), seconds=300, TESSERA_KINDS=str(kinds))
    # 10 of 30 bars, of three parts.
    assert json.loads(found.stdout)["datasets"] == {"digits": 10, "held-out": 360}
