"""An issuer of tokens, as far as a mesh sees one: a server that publishes its keys."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm


def public(key: Any, kid: str, **fields: str) -> dict[str, Any]:
    """As the issuer publishes it."""
    kind = RSAAlgorithm if isinstance(key, rsa.RSAPrivateKey) else (
        ECAlgorithm if isinstance(key, ec.EllipticCurvePrivateKey) else OKPAlgorithm)  # fmt: skip
    return {**json.loads(kind.to_jwk(key.public_key())), "kid": kid, **fields}


@contextmanager
def published(keys: list[dict[str, Any]]) -> Iterator[str]:
    """The URL of a real server that publishes the keys, which may change, at /jwks and says so where issuers do."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/.well-known/openid-configuration":
                body = json.dumps({"issuer": url, "jwks_uri": f"{url}/jwks", "response_types_supported": []}).encode()
            else:
                body = json.dumps({"keys": keys}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        log_message: Callable[..., None] = lambda *_: None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield url
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
