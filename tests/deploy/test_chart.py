"""The Helm chart, rendered by Helm itself where it is installed (extra `deploy`); never applied to a cluster here."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tessera.coordinator.settings import CoordinatorSettings

helm = pytest.importorskip("helm_python", reason="needs the extra `deploy`")
kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="needs the extra `deploy`")

KUBERNETES = ("1.25", "1.30", "1.34")

INGRESS = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ingress"}}}
LEAST: dict[str, Any] = {
    "database": {"existingSecret": "database"},
    "store": {"url": "s3://bucket/prefix"},
    "networkPolicy": {"from": [INGRESS]},
}
MOST: dict[str, Any] = {
    **LEAST,
    "store": {"url": "s3://b", "endpoint": "http://store", "existingSecret": "store", "allowHttp": True},
    "staging": {"existingClaim": "uploads"},
    "backup": {"existingClaim": "backups"},
    "coordinator": {"replicas": 3},
    "conductor": {"replicas": 2},
    "settings": {"LEASE_SECONDS": "120"},
    "oidcClientSecret": "oidc",
    "forwardedAllowIps": "10.244.0.0/16,fd00::/8",
    "otel": {"EXPORTER_OTLP_ENDPOINT": "http://collector:4318"},
    "serviceMonitor": {"enabled": True, "tokenSecret": "viewer", "labels": {"release": "prometheus"}},
    "image": {"tag": "1", "pullSecrets": [{"name": "pull"}]},
    "nodeSelector": {"disk": "fast"},
    "tolerations": [{"key": "dedicated", "operator": "Exists"}],
}


@pytest.fixture(scope="module")
def chart(deploy: Path) -> Iterator[Any]:
    with helm.Chart.load(str(deploy / "helm" / "tessera")) as loaded:
        yield loaded


def rendered(chart: Any, values: dict[str, Any]) -> list[dict[str, Any]]:
    files = chart.render(copy.deepcopy(values), name="fed", namespace="training")
    return [
        document
        for name, text in files.items()
        if name.endswith(".yaml")
        for document in yaml.safe_load_all(text)
        if document
    ]


def pods(documents: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The pods' templates, by what they are of."""
    specs = {d["metadata"]["name"]: d["spec"] for d in documents if d["kind"] in ("Deployment", "Job", "CronJob")}
    return {name: spec.get("jobTemplate", {}).get("spec", spec)["template"] for name, spec in specs.items()}


def test_helm_finds_nothing_to_mend(deploy: Path) -> None:
    found = helm.lint(str(deploy / "helm" / "tessera"), values=LEAST, strict=True)
    # It would also like a picture.
    assert [message for message in found["messages"] if message["error"] != "icon is recommended"] == []
    assert found["errors"] == []


@pytest.mark.parametrize("values", [LEAST, MOST], ids=["least", "most"])
@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_takes_every_document(chart: Any, values: dict[str, Any], version: str) -> None:
    documents = rendered(chart, values)
    assert len(documents) >= 8
    for document in documents:
        # Its kind belongs to an operator.
        if document["kind"] != "ServiceMonitor":
            kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("values", [LEAST, MOST], ids=["least", "most"])
def test_pods_keep_to_the_profile_restricted(chart: Any, values: dict[str, Any]) -> None:
    found = pods(rendered(chart, values))
    assert found.keys() - {"fed-backup"} == {"fed-coordinator", "fed-conductor", "fed-migration"}
    for name, pod in found.items():
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False, name
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        kinds = {kind for volume in spec["volumes"] for kind in volume if kind != "name"}
        assert kinds <= {"emptyDir", "ephemeral", "persistentVolumeClaim", "secret"}
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["limits"]["memory"]


@pytest.mark.parametrize("values", [LEAST, MOST], ids=["least", "most"])
def test_every_volume_that_a_container_mounts_is_declared(chart: Any, values: dict[str, Any]) -> None:
    for name, pod in pods(rendered(chart, values)).items():
        (container,) = pod["spec"]["containers"]
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["spec"]["volumes"]}, name


def test_uploads_are_on_a_volume_that_reports_its_own_size(chart: Any) -> None:
    values = {**LEAST, "staging": {"size": "50Gi", "storageClass": "fast"}}
    found = pods(rendered(chart, values))
    for name in ("fed-coordinator", "fed-conductor"):
        (data,) = [volume for volume in found[name]["spec"]["volumes"] if volume["name"] == "data"]
        claim = data["ephemeral"]["volumeClaimTemplate"]["spec"]
        assert claim["resources"]["requests"] == {"storage": "50Gi"}, name
        assert claim["storageClassName"] == "fast", name


def test_what_runs_on_is_watched_and_the_schema_comes_first(chart: Any) -> None:
    documents = rendered(chart, LEAST)
    for name, pod in pods(documents).items():
        (container,) = pod["spec"]["containers"]
        if name == "fed-migration":
            assert container["args"] == ["migrate"]
        else:
            assert {"startupProbe", "livenessProbe", "readinessProbe"} <= container.keys(), name
    (job,) = [document for document in documents if document["kind"] == "Job"]
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"


def test_backups_go_into_their_claim_one_at_a_time(chart: Any) -> None:
    documents = rendered(chart, MOST)
    (job,) = [document for document in documents if document["kind"] == "CronJob"]
    assert job["spec"]["concurrencyPolicy"] == "Forbid"
    pod = pods(documents)["fed-backup"]["spec"]
    (container,) = pod["containers"]
    assert container["args"] == ["backup", "/data/backup"]
    assert {"name": "data", "mountPath": "/data"} in container["volumeMounts"]
    assert {"name": "data", "persistentVolumeClaim": {"claimName": "backups"}} in pod["volumes"]


def test_a_restore_needs_no_coordinator(chart: Any) -> None:
    documents = rendered(chart, {**MOST, "coordinator": {"replicas": 0}, "conductor": {"replicas": 0}})
    replicas = {d["metadata"]["name"]: d["spec"]["replicas"] for d in documents if d["kind"] == "Deployment"}
    assert replicas == {"fed-coordinator": 0, "fed-conductor": 0}


def test_secrets_are_named_and_never_written(chart: Any) -> None:
    documents = rendered(chart, MOST)
    assert "Secret" not in {document["kind"] for document in documents}
    for pod in pods(documents).values():
        (container,) = pod["spec"]["containers"]
        given = {variable["name"]: variable for variable in container["env"]}
        # In files: a variable is shown to whoever may inspect a container.
        assert not any("valueFrom" in variable for variable in given.values())
        mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
        for name in ("TESSERA_DATABASE_URL_FILE", "AWS_ACCESS_KEY_ID_FILE", "AWS_SECRET_ACCESS_KEY_FILE"):
            assert str(Path(given[name]["value"]).parent) in mounted, name
        assert {mount["name"] for mount in container["volumeMounts"]} == {
            volume["name"] for volume in pod["spec"]["volumes"]
        }
        ours = {name[8:].lower() for name in given if name.startswith("TESSERA_")}
        assert ours <= set(CoordinatorSettings.model_fields)


@pytest.mark.parametrize(("values", "expected"), [(LEAST, None), (MOST, "10.244.0.0/16,fd00::/8")])
def test_the_coordinator_trusts_the_proxies_that_values_name(
    chart: Any, values: dict[str, Any], expected: str | None
) -> None:
    (container,) = pods(rendered(chart, values))["fed-coordinator"]["spec"]["containers"]
    given = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert given.get("FORWARDED_ALLOW_IPS") == expected


def test_nobody_but_the_coordinator_is_called(chart: Any) -> None:
    policies = [document for document in rendered(chart, LEAST) if document["kind"] == "NetworkPolicy"]
    closed, opened = sorted(policies, key=lambda policy: len(policy["metadata"]["name"]))
    assert closed["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert "ingress" not in closed["spec"]
    assert opened["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "coordinator"
    assert opened["spec"]["ingress"][0]["from"] == [INGRESS]
    assert opened["spec"]["ingress"][0]["ports"] == [{"protocol": "TCP", "port": 8470}]


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({**LEAST, "databse": {}}, "databse"),
        ({**LEAST, "coordinator": {"replicas": 1, "autoscale": True}}, "autoscale"),
        ({**LEAST, "store": {"url": "s3://key:secret@bucket"}}, "store/url"),
        ({**LEAST, "store": {"url": ""}}, "store.url"),
        ({**LEAST, "database": {"existingSecret": ""}}, "database.existingSecret"),
        ({**LEAST, "coordinator": {"replicas": 2}}, "staging"),
        ({**LEAST, "serviceMonitor": {"enabled": True}}, "tokenSecret"),
        ({**LEAST, "settings": {"LEASE_SECONDS": 120}}, "LEASE_SECONDS"),
        ({**LEAST, "forwardedAllowIps": "*"}, "forwardedAllowIps"),
        ({**LEAST, "networkPolicy": {}}, "networkPolicy.from"),
        ({**LEAST, "networkPolicy": {"from": [{"namespaceSelector": {}}]}}, "selects every namespace"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_values_that_cannot_work_are_refused_with_the_reason(chart: Any, values: dict[str, Any], why: str) -> None:
    with pytest.raises(helm.HelmError, match=why):
        rendered(chart, values)


def test_labels_select_each_part_alone(chart: Any) -> None:
    documents = rendered(chart, LEAST)
    labels = {name: pod["metadata"]["labels"] for name, pod in pods(documents).items()}
    (service,) = [document for document in documents if document["kind"] == "Service"]
    selected = [name for name, own in labels.items() if service["spec"]["selector"].items() <= own.items()]
    assert selected == ["fed-coordinator"]
