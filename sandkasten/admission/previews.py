"""Tokens of previews: who made one is known by its seal, and nothing of them is stored.

A token says nothing. It is the HMAC of the session, the opening, the port, the end and the access, so that it holds for
that preview alone, and for no other that the same port has later.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Sequence

from sandkasten.config import PreviewSettings
from sandkasten.errors import InvalidRequest, PreviewsOff
from sandkasten.model.network import EVERY_PORT, MAX_PREVIEWS, Preview, PreviewAccess, PreviewSpec


def check_preview(spec: PreviewSpec, settings: PreviewSettings, *, has_gateway: bool) -> None:
    """Raise `PreviewsOff` unless the node serves such previews, which takes a way to start a gateway, and
    `InvalidRequest` for a port of the node where none is needed."""
    is_local = spec.access is PreviewAccess.LOCAL
    if spec.port == EVERY_PORT and is_local:
        raise InvalidRequest("a published port is one port", port="must be 1 or more for the access local")
    if (settings.publish if is_local else settings.listen) is None:
        setting = "preview.publish" if is_local else "preview.listen"
        raise PreviewsOff(f"this node serves no such previews: {setting} is not set", setting=setting)
    if spec.host_port and not is_local:
        raise InvalidRequest("a port of the node is for the access local", host_port='needs "access": "local"')
    if not has_gateway:
        raise PreviewsOff("this daemon has no way to start a gateway")


def check_publish(wanted: Sequence[PreviewSpec], settings: PreviewSettings, *, has_gateway: bool) -> None:
    """Raise `InvalidRequest` unless a new session can have these previews, and as `check_preview`."""
    if len({each.port for each in wanted}) < len(wanted) or len(wanted) > MAX_PREVIEWS:
        raise InvalidRequest("the ports are too many, or not different", publish=f"at most {MAX_PREVIEWS}, each once")
    for each in wanted:
        check_preview(each, settings, has_gateway=has_gateway)


def preview_key(node_key: bytes) -> bytes:
    """Return the key of tokens, which the node's key gives away and that does not give away the node's."""
    return hmac.digest(node_key, b"sandkasten previews", hashlib.sha256)


def published_url(settings: PreviewSettings, host_port: int) -> str:
    """Return where a published port is reached."""
    host = settings.publish or ""
    return f"tcp://[{host}]:{host_port}" if ":" in host else f"tcp://{host}:{host_port}"


def preview_url(settings: PreviewSettings, session_id: str, port: int, *, listen_port: int) -> str:
    """Return the URL of a preview; `listen_port` is the gateway's, which a proxy before it hides."""
    name = f"{'{port}' if port == EVERY_PORT else port}-{session_id}"
    if settings.domain is None:
        return f"http://{name}.localhost:{listen_port}/"
    return f"https://{name}.{settings.domain}/"


def sign_preview(key: bytes, session_id: str, preview: Preview) -> str:
    """Return the token of a preview."""
    end = round(preview.expires_at.timestamp() * 1000)
    said = f"{session_id} {preview.epoch} {preview.port} {end} {preview.access.value}"
    seal = hmac.digest(key, said.encode(), hashlib.sha256)
    return base64.urlsafe_b64encode(seal).rstrip(b"=").decode()


def is_admitted(key: bytes, session_id: str, preview: Preview, tokens: Sequence[str]) -> bool:
    """Whether one of the tokens is that of the preview, or none is needed."""
    if preview.access is not PreviewAccess.TOKEN:
        return True
    token = sign_preview(key, session_id, preview).encode()
    return any(hmac.compare_digest(token, each.encode()) for each in tokens)
