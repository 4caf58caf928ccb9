"""Bearer tokens: they name their tenant, and are compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import string
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvstore.errors import InvalidRequest, Unauthenticated
from kvstore.server.secrets import read_private

TOKEN_CHARACTERS_MIN = 16
FILE_BYTES_MAX = 1 << 20
HASHED = "sha256:"
SCHEME = "Bearer "
ADMIN = "admin"
"""The word that follows a token whose bearer has the operator's right."""


class Token(NamedTuple):
    """A token by its SHA-256 digest. ``is_admin``: its bearer has the operator's right."""

    digest: bytes
    is_admin: bool


def read_tokens(path: Path, setting: str) -> list[Token]:
    """Return a file's tokens; there may be none. Raises InvalidRequest naming the setting, and never a token, for a
    file that cannot be read, that others may read or write, or that has a malformed line."""
    data = read_private(path, setting, FILE_BYTES_MAX + 1, "one token per line")
    if len(data) > FILE_BYTES_MAX:
        raise InvalidRequest(f"{setting} = {path}: it has more than {FILE_BYTES_MAX} bytes")
    try:
        lines = data.decode().splitlines()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{setting} = {path}: it is no text: {error.reason}") from error
    found = []
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if text:
            found.append(_token(text, f"{setting} = {path}: line {number}"))
    return found


def _token(text: str, place: str) -> Token:
    first, *right = text.split()
    is_admin = right == [ADMIN]
    return Token(_digest(first if is_admin else text, place), is_admin)


def _digest(text: str, place: str) -> bytes:
    if text.startswith(HASHED):
        digits = text.removeprefix(HASHED)
        if len(digits) != 64 or not set(digits) <= set(string.hexdigits):
            raise InvalidRequest(f"{place} must be sha256: and 64 hexadecimal digits")
        return bytes.fromhex(digits)
    if len(text) < TOKEN_CHARACTERS_MIN or not text.isascii() or any(each.isspace() for each in text):
        raise InvalidRequest(
            f"{place} must be at least {TOKEN_CHARACTERS_MIN} ASCII characters without spaces, then {ADMIN} or nothing"
        )
    return hashlib.sha256(text.encode()).digest()


class TokenFile(NamedTuple):
    """A tenant's file of tokens, and the setting that names it."""

    tenant: str
    path: Path
    setting: str


class AccessTokens:
    """All tenants' tokens, from their files. Raises InvalidRequest as ``read_tokens``, for a file without a token,
    and where a token is another tenant's, too."""

    def __init__(self, files: Sequence[TokenFile]) -> None:
        self._files = files
        self._of: Mapping[str, list[Token]] = {}
        """Each tenant's tokens."""
        self._empty: set[str] = set()
        """The tenants whose files had no token when they were last read."""
        for each in files:
            self.read_again(each)

    def read_again(self, file: TokenFile) -> None:
        """Know the tokens that a tenant's file has by now, and no others of this tenant. Raises as the constructor:
        those before stay. A file that has none is being written, perhaps: it counts when it is read again and still has
        none. Where a token was another tenant's, that one's file is read again, too: it may have another one by now."""
        was_empty = file.tenant in self._empty
        self._empty.discard(file.tenant)
        tokens = read_tokens(file.path, file.setting)
        if not tokens:
            self._empty.add(file.tenant)
            if not was_empty:
                raise InvalidRequest(f"{file.setting} = {file.path}: it has no token; write one per line")
        of = {**self._of, file.tenant: tokens}
        if owner := _owner(of, file.tenant):
            of = self._in_all_files(file.tenant, tokens)
            if of[file.tenant] is not tokens:
                raise InvalidRequest(f"{file.setting}: one of its tokens is tenant {owner}'s, too: give each its own")
        self._of = of

    def _in_all_files(self, tenant: str, tokens: list[Token]) -> dict[str, list[Token]]:
        """Return the tokens that every tenant's file has by now; those before for a tenant whose file cannot be read,
        or has a token of another one. ``tokens``: what the tenant's own file has."""
        fresh = {tenant: tokens}
        for each in self._files:
            if each.tenant in self._of and each.tenant != tenant:
                with suppress(InvalidRequest):
                    fresh[each.tenant] = read_tokens(each.path, each.setting) or self._of[each.tenant]
        while True:
            of = {tenant: [], **self._of, **fresh}
            shared = [each for each in fresh if _owner(of, each)]
            if not shared:
                return of
            for name in shared:
                del fresh[name]

    def tenant(self, authorization: str | bytes | None) -> str:
        """Return the token's tenant. Raises Unauthenticated."""
        return self._find(authorization)[0]

    def may_administer(self, authorization: str | bytes | None) -> bool:
        """True when the token's bearer has the operator's right for its own tenant. Raises Unauthenticated."""
        return self._find(authorization)[1]

    def _find(self, authorization: str | bytes | None) -> tuple[str, bool]:
        """Return a token's tenant, and whether its bearer has the operator's right. Compares every known token, so that
        the time tells nothing. Raises Unauthenticated."""
        if not isinstance(authorization, str) or not authorization.startswith(SCHEME):
            raise Unauthenticated("this address needs a token: connect(address, token=...)")
        given = hashlib.sha256(authorization.removeprefix(SCHEME).encode()).digest()
        found, is_admin = "", False
        for tenant, tokens in self._of.items():
            for token in tokens:
                if hmac.compare_digest(token.digest, given):
                    found, is_admin = tenant, token.is_admin
        if not found:
            raise Unauthenticated(
                "the token is not one of this server's: see remote.token_file, or its tenant's, there"
            )
        return found, is_admin


def _owner(of: Mapping[str, list[Token]], tenant: str) -> str:
    """Return another tenant that has one of this one's tokens; empty: none has."""
    own = {token.digest for token in of[tenant]}
    return next((who for who, theirs in of.items() if who != tenant and any(each.digest in own for each in theirs)), "")
