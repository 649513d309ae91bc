"""Who is let in: API keys, web pages of other origins, TLS, and paths behind a proxy."""

from __future__ import annotations

import hmac
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from fastapi import FastAPI

from chairlift.api.auth import RequireKey
from chairlift.api.server import tls_context
from chairlift.config import ConfigError, ServerConfig

pytestmark = pytest.mark.anyio
HI = {"model": "tiny", "prompt": "Hi"}
OPEN = ("/health", "/ready", "/metrics")
Make = Callable[[ServerConfig], FastAPI]


@asynccontextmanager
async def talking_to(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


# ---- keys ----


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models", "/v1/models/tiny", "/version", "/", "/nowhere"])
@pytest.mark.parametrize(
    "offered",
    [None, "", "Bearer", "Bearer ", "Bearer wrong", "Basic secret", "secret", "Bearer secre", "Bearer secret2"],
)
async def test_no_way_in_without_a_key(make_app: Make, engine: Any, path: str, offered: str | None) -> None:
    headers = {} if offered is None else {"authorization": offered}
    async with talking_to(make_app(ServerConfig(api_keys=("secret",)))) as client:
        response = await client.request("POST" if "completions" in path else "GET", path, headers=headers)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.headers["x-request-id"]
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
    assert not engine.asked


@pytest.mark.parametrize("offered", ["Bearer secret", "bearer secret", "Bearer  secret ", "Bearer zw\u00f6lf"])
async def test_each_key_opens_the_api(make_app: Make, offered: str) -> None:
    headers = {b"authorization": offered.encode()}
    async with talking_to(make_app(ServerConfig(api_keys=("secret", "zw\u00f6lf")))) as client:
        assert (await client.post("/v1/completions", json=HI, headers=headers)).status_code == 200


async def test_probes_and_metrics_need_no_key(make_app: Make) -> None:
    async with talking_to(make_app(ServerConfig(api_keys=("secret",)))) as client:
        for path in OPEN:
            assert (await client.get(path)).status_code == 200
            assert (await client.get(f"{path}/")).status_code == 401


async def test_every_key_is_compared_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return one == other

    monkeypatch.setattr(hmac, "compare_digest", compare)
    keys = RequireKey(lambda *_: None, ["first", "second", "a third that is longer"])  # type: ignore[arg-type]
    assert keys._problem("Bearer first") is None
    assert keys._problem("Bearer x") is not None
    assert len(compared) == 6
    assert {len(digest) for pair in compared for digest in pair} == {32}


# ---- other origins ----


async def test_other_origins_are_not_answered_unless_they_are_named(make_app: Make) -> None:
    origin = {"origin": "https://page.example"}
    preflight = origin | {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    async with talking_to(make_app(ServerConfig())) as client:
        assert "access-control-allow-origin" not in (await client.get("/v1/models", headers=origin)).headers
    config = ServerConfig(allowed_origins=("https://page.example",), api_keys=("secret",))
    async with talking_to(make_app(config)) as client:
        answer = await client.options("/v1/completions", headers=preflight)  # browsers send no key with it
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://page.example"
        assert "authorization" in answer.headers["access-control-allow-headers"]
        refused = await client.get("/v1/models", headers=origin)
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://page.example"
        assert "retry-after" in refused.headers["access-control-expose-headers"]
        other = await client.options("/v1/completions", headers=preflight | {"origin": "https://else.example"})
        assert other.status_code == 400


# ---- behind a proxy ----


async def test_a_prefix_that_a_proxy_leaves_in_place(make_app: Make) -> None:
    async with talking_to(make_app(ServerConfig(root_path="/llm", api_keys=("secret",)))) as client:
        for path in OPEN:
            assert (await client.get(path)).status_code == 200
            assert (await client.get(f"/llm{path}")).status_code == 200
        assert (await client.get("/llm/v1/models")).status_code == 401
        assert (await client.get("/llm/v1/models", headers={"authorization": "Bearer secret"})).status_code == 200
        assert (await client.get("/llmhealth")).status_code == 401


# ---- TLS ----


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def files(authority: trustme.CA, tmp_path: Path) -> dict[str, str]:
    certificate = authority.issue_cert("127.0.0.1")
    paths = {name: str(tmp_path / name) for name in ("key", "certificate", "authority", "nonsense", "other-key")}
    certificate.private_key_pem.write_to_path(paths["key"])
    for blob in certificate.cert_chain_pems:
        blob.write_to_path(paths["certificate"], append=True)
    authority.cert_pem.write_to_path(paths["authority"])
    authority.issue_cert("else.example").private_key_pem.write_to_path(paths["other-key"])
    Path(paths["nonsense"]).write_text("no PEM")
    return paths


async def test_tls(app: FastAPI, live: Any, files: dict[str, str], authority: trustme.CA) -> None:
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    tls = tls_context(ServerConfig(ssl_keyfile=files["key"], ssl_certfile=files["certificate"]))
    async with live(app, tls=tls) as url:
        assert url.startswith("https://127.0.0.1:")
        async with httpx.AsyncClient(base_url=url, verify=trusting) as client:
            assert (await client.post("/v1/completions", json=HI)).json()["choices"][0]["text"] == "Hello world"
        async with httpx.AsyncClient(base_url=url.replace("https", "http")) as plain:
            with pytest.raises(httpx.RemoteProtocolError):
                await plain.get("/health")


async def test_certificates_of_clients(app: FastAPI, live: Any, files: dict[str, str], authority: trustme.CA) -> None:
    own = {"ssl_keyfile": files["key"], "ssl_certfile": files["certificate"]}
    tls = tls_context(ServerConfig(**own, ssl_ca_certs=files["authority"]))
    trusting, known = ssl.create_default_context(), ssl.create_default_context()
    for context in (trusting, known):
        authority.configure_trust(context)
    authority.issue_cert("client.example").configure_cert(known)
    async with live(app, tls=tls) as url:
        async with httpx.AsyncClient(base_url=url, verify=known) as client:
            assert (await client.get("/health")).status_code == 200
        async with httpx.AsyncClient(base_url=url, verify=trusting) as stranger:
            with pytest.raises((httpx.ReadError, httpx.ConnectError, httpx.RemoteProtocolError)):
                await stranger.get("/health")
    asked = tls_context(ServerConfig(**own, ssl_ca_certs=files["authority"], ssl_cert_reqs=1))
    assert asked is not None
    assert asked.verify_mode == ssl.CERT_OPTIONAL


@pytest.mark.parametrize(
    ("key", "certificate", "said"),
    [
        ("key", "absent", "cannot read --ssl-certfile"),
        ("absent", "certificate", "cannot read --ssl-keyfile"),
        ("nonsense", "certificate", "not a PEM certificate and its unencrypted PEM key"),
        ("key", "nonsense", "not a PEM certificate"),
        ("other-key", "certificate", "KEY_VALUES_MISMATCH"),
    ],
)
def test_files_that_cannot_be_used(files: dict[str, str], key: str, certificate: str, said: str) -> None:
    config = ServerConfig(ssl_keyfile=files.get(key, key), ssl_certfile=files.get(certificate, certificate))
    with pytest.raises(ConfigError, match=said):
        tls_context(config)


def test_authorities_that_cannot_be_used(files: dict[str, str]) -> None:
    own = {"ssl_keyfile": files["key"], "ssl_certfile": files["certificate"]}
    for path, said in (("nonsense", "has no PEM certificate"), ("absent", "cannot read --ssl-ca-certs")):
        with pytest.raises(ConfigError, match=said):
            tls_context(ServerConfig(**own, ssl_ca_certs=files.get(path, path)))


def test_plain_http_needs_no_context() -> None:
    assert tls_context(ServerConfig()) is None
