"""The calls to an API server that tests and their kubelet make: plain objects, as JSON."""

import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import httpx

Manifest = dict[str, Any]

DEADLINE_S: Final = 10.0
JSON: Final = "application/json"
MERGE_PATCH: Final = "application/merge-patch+json"
APPLY_PATCH: Final = "application/apply-patch+yaml"
TABLE: Final = "application/json;as=Table;v=v1;g=meta.k8s.io"
"""What kubectl asks for, to print columns."""


class Refused(Exception):
    """The API server's answer was no."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


UNANSWERED: Final = (httpx.HTTPError, Refused)


class ApiServer:
    """One API server, asked with one token."""

    def __init__(self, url: str, token: str, authority: Path) -> None:
        context = ssl.create_default_context(cafile=str(authority))
        headers = {"authorization": f"Bearer {token}"}
        self._http = httpx.Client(base_url=url, verify=context, headers=headers, timeout=DEADLINE_S, trust_env=False)
        self._plurals: dict[tuple[str, str], str] = {}

    def call(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        kind: str = JSON,
        accept: str = JSON,
        query: Mapping[str, str] | None = None,
    ) -> Any:
        """The answer, decoded if it is JSON. Raises `Refused`, httpx.HTTPError."""
        headers = {"accept": accept, "content-type": kind}
        answer = self._http.request(method, path, json=body, headers=headers, params=query)
        is_json = answer.headers.get("content-type", "").startswith(JSON)
        said = answer.json() if is_json else answer.text
        if answer.is_error:
            raise Refused(answer.status_code, said["message"] if is_json else said)
        return said

    def get(self, path: str, **query: str) -> Any:
        return self.call("GET", path, query=query)

    def apply(self, manifest: Manifest, namespace: str, *, dry_run: bool = False) -> Manifest:
        """By server-side apply, as `kubectl apply --server-side` does it."""
        query = {"fieldManager": "test", **({"dryRun": "All"} if dry_run else {})}
        path = f"{self.path_of(manifest, namespace)}/{manifest['metadata']['name']}"
        applied: Manifest = self.call("PATCH", path, manifest, kind=APPLY_PATCH, query=query)
        return applied

    def path_of(self, manifest: Manifest, namespace: str) -> str:
        """Of all objects of its kind, as discovery tells it. Raises `Refused` where it has no such kind."""
        version, kind = manifest["apiVersion"], manifest["kind"]
        prefix = f"/apis/{version}" if "/" in version else f"/api/{version}"
        if (version, kind) not in self._plurals:
            for each in self.get(prefix)["resources"]:
                space = f"namespaces/{{}}/{each['name']}" if each["namespaced"] else each["name"]
                if "/" not in each["name"]:
                    self._plurals[version, each["kind"]] = f"{prefix}/{space}"
        if (version, kind) not in self._plurals:
            raise Refused(404, f"no {kind} in {version}")
        return self._plurals[version, kind].format(namespace)

    def close(self) -> None:
        self._http.close()
