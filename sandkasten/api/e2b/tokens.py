"""Tokens of sandboxes and signatures of URLs: nothing of them is stored. Pure.

A token is the HMAC of a session's id by a key that only this node has, so that it is good for that session alone, and
for what E2B's API offers of one. A signed URL has no header, and names no sandbox: its signature is a digest of the
path, the action, the user and the token.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Iterable
from typing import Literal

Action = Literal["read", "write"]


def access_token(key: bytes, session_id: str) -> str:
    """Return the token of a session."""
    return hmac.digest(key, f"envd:{session_id}".encode(), hashlib.sha256).hex()


def is_token_of(key: bytes, session_id: str, token: str) -> bool:
    """Whether a token is that of the session, in the same time for every wrong one."""
    return hmac.compare_digest(access_token(key, session_id).encode(), token.encode("utf-8", "replace"))


def sign(path: str, action: Action, user: str, token: str, expiration: str | None) -> str:
    """Return the signature of a URL."""
    said = ":".join([path, action, user, token, *([] if expiration is None else [expiration])])
    digest = hashlib.sha256(said.encode("utf-8", "surrogatepass")).digest()
    return "v1_" + base64.b64encode(digest).rstrip(b"=").decode("ascii")


def find_signer(
    key: bytes,
    session_ids: Iterable[str],
    signature: str,
    *,
    path: str,
    action: Action,
    user: str,
    expiration: str | None,
) -> str | None:
    """Return the session whose token signed a URL, None if there is none. Every session is compared with."""
    given = signature.encode("utf-8", "replace")
    found = None
    for session_id in session_ids:
        right = sign(path, action, user, access_token(key, session_id), expiration)
        if hmac.compare_digest(right.encode(), given):
            found = session_id
    return found
