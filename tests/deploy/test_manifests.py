"""The chart as Helm renders it, and every manifest against Kubernetes' own schemas.

Needs `pip install -e '.[deploy]'` (Helm as a library, and the schemas); no cluster, no network. The
schema of a RayCluster is in no package: RAY_CLUSTER says the fields of it that are used here.
"""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

helm = pytest.importorskip("helm_python", reason="needs the extra [deploy]")
kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="needs the extra [deploy]")
jsonschema = pytest.importorskip("jsonschema", reason="needs the extra [deploy]")
yaml = pytest.importorskip("yaml", reason="needs the extra [deploy]")

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "helm/headrace"
REMARK = 1  # of Helm's severities
VERSIONS = ("1.25", "1.31", "1.37")  # the oldest that the chart takes, and later ones

# Names, types and what is required are those of ray-operator/apis/ray/v1/raycluster_types.go of
# KubeRay. A field that is used for the first time is looked up there.
_COUNT = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
_GROUP = {
    # Words of `ray start`, so all of them are texts.
    "rayStartParams": {"type": "object", "additionalProperties": {"type": "string"}},
    "template": {"type": "object"},  # of pods, for which Kubernetes has a schema
}
_WORKERS = _GROUP | {
    "groupName": {"type": "string", "minLength": 1},
    "replicas": _COUNT,
    "minReplicas": _COUNT,
    "maxReplicas": _COUNT,
}


def _exactly(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


RAY_CLUSTER = _exactly(
    {
        "apiVersion": {"const": "ray.io/v1"},
        "kind": {"const": "RayCluster"},
        "metadata": {"type": "object", "required": ["name"]},  # Kubernetes' own
        "spec": _exactly(
            {
                "rayVersion": {"type": "string"},
                "headGroupSpec": _exactly(_GROUP, *_GROUP),
                "workerGroupSpecs": {
                    "type": "array",
                    "items": _exactly(_WORKERS, *_GROUP, "groupName", "minReplicas", "maxReplicas"),
                },
            },
            "headGroupSpec",
        ),
    },
    "apiVersion",
    "kind",
    "metadata",
    "spec",
)

Manifest = dict[str, Any]

VALUES: dict[str, dict[str, Any]] = {
    "default": {},
    "several": {
        "model": "/models/m.gguf",
        "existingSecret": "ours",
        "modelVolume": {"persistentVolumeClaim": {"claimName": "models"}},
        "imagePullSecrets": [{"name": "registry"}],
        "front": {
            "replicas": 2,
            "args": ["--router-policy", "kv"],
            "nodeSelector": {"disk": "ssd"},
            "tolerations": [{"key": "a", "operator": "Exists"}],
        },
        "workers": {
            "mixed": None,
            "prefill": {"role": "prefill", "replicas": 1},
            "decode": {"role": "decode", "replicas": 3, "nodeSelector": {"kind": "gpu"}},
        },
        "service": {"type": "LoadBalancer"},
    },
    "bare": {"podDisruptionBudget": {"enabled": False}, "networkPolicy": {"enabled": False}},
}


def rendered(values: dict[str, Any]) -> list[Manifest]:
    with helm.Chart.load(str(CHART)) as chart:
        files = chart.render(values, name="test", namespace="here")
    return [
        manifest for text in files.values() for manifest in yaml.safe_load_all(text) if manifest
    ]


def of_kind(manifests: list[Manifest], kind: str) -> dict[str, Manifest]:
    return {one["metadata"]["name"]: one for one in manifests if one["kind"] == kind}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_the_chart_is_what_kubernetes_takes(values: dict[str, Any], version: str) -> None:
    manifests = rendered(values)
    assert len(manifests) >= 5
    for manifest in manifests:
        kubernetes_validate.validate(manifest, version, strict=True)


def test_the_schemas_find_a_fault() -> None:
    (front, *_) = of_kind(rendered({}), "StatefulSet").values()
    front["spec"]["template"]["spec"]["containers"][0]["imagePullPolicies"] = "Never"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(front, VERSIONS[-1], strict=True)


def test_pods_have_no_rights() -> None:
    sets = of_kind(rendered({}), "StatefulSet")
    assert set(sets) == {"test-headrace-front", "test-headrace-mixed"}
    for one in sets.values():
        pod = one["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert not pod["automountServiceAccountToken"]
        (container,) = pod["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert "memory" in container["resources"]["limits"]


def test_workers_go_to_every_front_end_by_its_name() -> None:
    manifests = rendered(VALUES["several"])
    sets = of_kind(manifests, "StatefulSet")
    fronts = sets["test-headrace-front"]["spec"]
    (port,) = of_kind(manifests, "Service")[fronts["serviceName"]]["spec"]["ports"]
    for name, role in (("test-headrace-prefill", "prefill"), ("test-headrace-decode", "decode")):
        (container,) = sets[name]["spec"]["template"]["spec"]["containers"]
        words = container["args"]
        assert [word for word in words if word.startswith("--connect=")] == [
            f"--connect=test-headrace-front-{index}.{fronts['serviceName']}:{port['port']}"
            for index in range(fronts["replicas"])
        ]
        assert f"--role={role}" in words


def test_workers_find_a_front_end_that_waits_for_them() -> None:
    service = of_kind(rendered({}), "Service")["test-headrace-front"]
    assert service["spec"]["publishNotReadyAddresses"]


def test_nobody_is_killed_while_it_drains() -> None:
    values = {"front": {"drainTimeoutSeconds": 90}}
    pod = of_kind(rendered(values), "StatefulSet")["test-headrace-front"]["spec"]["template"]
    assert "--drain-timeout-s=90" in pod["spec"]["containers"][0]["args"]
    assert pod["spec"]["terminationGracePeriodSeconds"] > 90


def test_the_secret_is_made_unless_there_is_one() -> None:
    assert "test-headrace" in of_kind(rendered({}), "Secret")
    assert not of_kind(rendered({"existingSecret": "ours"}), "Secret")


@pytest.mark.parametrize(
    "values",
    [
        {"replicas": 3},
        {"front": {"replicas": 0}},
        {"workers": {"mixed": {"role": "both"}}},
        {"workers": {"Mixed_1": {"role": "mixed", "replicas": 1}}},
        {"modelVolume": {"name": "mine", "emptyDir": {}}},
        {"service": {"port": "http"}},
    ],
)
def test_values_that_mean_nothing_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(helm.HelmError):
        rendered(values)


def test_helm_has_nothing_to_say_against_it() -> None:
    findings = helm.lint(str(CHART))
    assert not findings["errors"]
    # An icon is recommended, which is no more than a remark.
    assert all(message["severity"] <= REMARK for message in findings["messages"]), findings


def ray_cluster() -> tuple[Manifest, list[Manifest], Manifest]:
    """The cluster, its groups of pods, and its service."""
    cluster, service = yaml.safe_load_all((DEPLOY / "kuberay/raycluster.yaml").read_text())
    return (
        cluster,
        [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]],
        service,
    )


def test_whoever_speaks_to_ray_has_its_token() -> None:
    _, groups, _ = ray_cluster()
    containers = [one for group in groups for one in group["template"]["spec"]["containers"]]
    assert [one["name"] for one in containers] == ["ray-head", "front", "ray-worker"]
    for container in containers:
        env = {one["name"]: one for one in container["env"]}
        assert env["RAY_AUTH_MODE"]["value"] == "token"
        secret = env["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"]
        assert secret == {"name": "headrace-ray", "key": "auth_token"}


def test_the_ray_cluster_is_what_kuberay_takes() -> None:
    cluster, _, _ = ray_cluster()
    jsonschema.validate(cluster, RAY_CLUSTER)
    for group in cluster["spec"]["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


@pytest.mark.parametrize(
    ("place", "field", "value"),
    [
        ("cluster", "apiVersion", "ray.io/v1alpha1"),
        ("spec", "rayVersion", 2.6),
        ("spec", "workerGroupSpec", []),
        ("head", "replicas", 1),
        ("head", "rayStartParams", {"num-cpus": 0}),
        ("workers", "minReplicas", "1"),
        ("workers", "maxReplicas", None),
        ("workers", "rayStartParam", {}),
    ],
)
def test_a_fault_in_the_ray_cluster_is_found(place: str, field: str, value: object) -> None:
    cluster = deepcopy(ray_cluster()[0])
    spec = cluster["spec"]
    places = {
        "cluster": cluster,
        "spec": spec,
        "head": spec["headGroupSpec"],
        "workers": spec["workerGroupSpecs"][0],
    }
    places[place][field] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(cluster, RAY_CLUSTER)


def test_the_pods_of_the_ray_cluster_are_what_kubernetes_takes() -> None:
    _, groups, service = ray_cluster()
    for group in groups:
        pod = {"apiVersion": "v1", "kind": "Pod"} | group["template"]
        for version in VERSIONS:
            kubernetes_validate.validate(pod, version, strict=True)
    kubernetes_validate.validate(service, VERSIONS[-1], strict=True)
    labels = groups[0]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
