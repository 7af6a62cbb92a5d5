"""Authentication of connections: TLS 1.3 between ends that share a secret.

From each shared secret both ends derive the same private key and the same self-signed certificate.
A connection uses one secret, which the client chooses by its certificate. Both ends present the
certificate of that secret and accept no other. Each end thereby proves that it has the secret, and
no third party can read, change, or replay the traffic. An end may accept several secrets during a
rotation. Users with a public key infrastructure pass TLS contexts instead.

All holders of one secret can call themselves by any name. If each peer has its own secret
(`PeerAccess`) or its own certificate, a peer can use only the name that belongs to its key.
"""

from __future__ import annotations

import hashlib
import socket
import ssl
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from kvatlas.errors import AtlasError, Code
from kvatlas.wire.fork_safety import close_in_children
from kvatlas.wire.secret_identity import PeerIdentity, SecretIdentity, tls_context

Secret = bytes | Sequence[bytes] | None
"""A shared secret, or several during a rotation, the preferred one first."""

MIN_SECRET_BYTES = 16
_MAX_SECRETS = 4
_MAX_PEERS = 1024
_HANDSHAKE_FAILURE = bytes([21, 3, 3, 0, 2, 2, 40])
"""The fatal alert `handshake_failure` as a TLS record."""


@dataclass(frozen=True)
class TlsContexts:
    """User-provided TLS contexts: one to accept connections, one to open them.

    Both must verify the other end's certificate. The client context decides whether host names are
    checked as well.
    """

    server: ssl.SSLContext
    client: ssl.SSLContext


@dataclass(frozen=True)
class PeerAccess:
    """The permissions of one peer, and the secret that proves its name.

    `secret` is known only to this node and the peer. During a rotation it is `(new, old)`. Omit
    `secret` with TLS contexts: the peer's certificate then proves its name.
    """

    secret: Secret = field(default=None, repr=False)
    may_read: bool = True
    """Whether the peer may pull requests that are offered to it."""
    may_push: bool = True
    """Whether the peer may push requests that are expected from it."""


class Security:
    """The protection of a node's connections: secrets, TLS contexts, or none.

    >>> Security().protected, Security(b"0123456789abcdef").protected
    (False, True)
    >>> Security("0123456789abcdef")  # doctest: +NORMALIZE_WHITESPACE
    Traceback (most recent call last):
    kvatlas.errors.AtlasError: A shared secret must be a bytes object of at least 16 bytes.
    Got a str.
    Make one with secrets.token_bytes(32), and give it to all nodes as bytes. [bad_secret]
    """

    def __init__(
        self,
        secret: Secret = None,
        *,
        tls: TlsContexts | None = None,
        peers: Mapping[str, PeerAccess] | None = None,
    ) -> None:
        self._tls, self._peers = tls, None if peers is None else dict(peers)
        if tls is not None:
            _check_contexts(tls, secret)
        if self._peers is not None:
            self._identities = _peer_identities(self._peers, secret, tls)
        else:
            self._identities = tuple(SecretIdentity(one) for one in _checked_secrets(secret))
        self._accepting = self._make_accepting()

    @property
    def protected(self) -> bool:
        """Whether connections are authenticated."""
        return self._accepting is not None

    @property
    def choices(self) -> int:
        """The number of secrets to try when opening a connection; 1 if there is no secret."""
        return max(1, len(self._identities))

    def wrap(self, accepted: socket.socket) -> socket.socket:
        """Wrap an accepted connection for its TLS handshake."""
        if self._accepting is None:
            return accepted
        return self._accepting.wrap_socket(
            accepted, server_side=True, do_handshake_on_connect=False
        )

    def identify(self, accepted: socket.socket) -> PeerIdentity:
        """Complete the handshake within the socket's time-out, and return the peer's identity.

        All holders of one secret have the same certificate, so they are distinguished by host. On a
        non-blocking socket, call again after `ssl.SSLWantReadError` or `ssl.SSLWantWriteError`.
        """
        if not isinstance(accepted, ssl.SSLSocket):
            return self._proved(accepted, None)
        try:
            accepted.do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as problem:
            _send_tls_alert(accepted)
            unknown = problem.reason == "CALLBACK_FAILED"  # `choose` found no secret of that name
            raise not_the_secret("a different secret" if unknown else problem.reason) from None
        chosen = (one for one in self._identities if one.server is accepted.context)
        return self._proved(accepted, next(chosen, None))

    def open(self, connection: socket.socket, host: str, choice: int) -> socket.socket:
        """Open a protected connection with secret number `choice`, or with the TLS context."""
        protected = self.begin(connection, host, choice)
        if isinstance(protected, ssl.SSLSocket):
            try:
                protected.do_handshake()
                self.verify(protected, choice)
            except BaseException:
                protected.close()
                raise
        return protected

    def begin(self, connection: socket.socket, host: str, choice: int) -> socket.socket:
        """Wrap a new connection for its TLS handshake.

        The TLS context is used if there is one, otherwise the secret with index `choice`.
        """
        if not self.protected:
            return connection
        if self._tls is not None:
            context, name = self._tls.client, host
        else:
            context, name = self._identities[choice].client, self._identities[choice].name
        # Wrapped before the handshake: a child that is forked during it closes its copy too.
        return close_in_children(
            context.wrap_socket(connection, server_hostname=name, do_handshake_on_connect=False)
        )

    def verify(self, opened: socket.socket, choice: int) -> PeerIdentity:
        """Return the identity of the other end, after the handshake of an opened connection."""
        by_secret = isinstance(opened, ssl.SSLSocket) and self._tls is None
        return self._proved(opened, self._identities[choice] if by_secret else None)

    def _proved(self, connected: socket.socket, identity: SecretIdentity | None) -> PeerIdentity:
        """Return the other end's identity, from its certificate or the secret of `identity`."""
        host = str(connected.getpeername()[0])
        if not isinstance(connected, ssl.SSLSocket):
            return PeerIdentity(host)
        binary = connected.getpeercert(binary_form=True) or b""
        if self._tls is not None:
            return PeerIdentity(hashlib.sha256(binary).hexdigest(), certified_names(connected))
        if identity is None or binary != identity.certificate:
            raise not_the_secret("a certificate that does not match the secret")
        return identity.peer(host)

    def check_name(self, name: str, proved: frozenset[str] | None) -> None:
        """Raise `bad_handshake` if a peer uses a name that its key does not prove."""
        known = self._peers is None or name in self._peers
        if known and (proved is None or name in proved):
            return
        raise AtlasError(
            Code.BAD_HANDSHAKE,
            "The peer's key does not belong to the name that the peer uses",
            got=f"name {name!r} with a key for {', '.join(sorted(proved or ())) or 'no name'}",
            hint="In the peer, set name= to a name in its certificate. With peers=, check that it "
            "uses the secret listed for its name",
        )

    def check_role(self, name: str, act: Literal["pull", "push"]) -> None:
        """Raise `forbidden` if a peer of this name may not pull or push."""
        if not self.has_role(name, act):
            role = "may_read" if act == "pull" else "may_push"
            raise AtlasError(
                Code.FORBIDDEN,
                f"The peer has no permission to {act}",
                got=f"a {act} by {name!r}",
                hint=f"Pass peers={{{name!r}: PeerAccess(..., {role}=True)}} to the refusing node",
            )

    def has_role(self, name: str, act: Literal["pull", "push"]) -> bool:
        """Whether a peer of this name may pull or push."""
        access = PeerAccess() if self._peers is None else self._peers.get(name)
        return access is not None and (access.may_read if act == "pull" else access.may_push)

    def _make_accepting(self) -> ssl.SSLContext | None:
        if self._tls is not None:
            # Session tickets would make an idle connection readable, as if the peer had closed it.
            self._tls.server.num_tickets = 0
            return self._tls.server
        if not self._identities:
            return None
        by_name = {identity.name: identity.server for identity in self._identities}

        def choose(protected: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> int | None:
            if name not in by_name:
                return ssl.AlertDescription.ALERT_DESCRIPTION_UNRECOGNIZED_NAME
            protected.context = by_name[name]
            return None

        accepting = tls_context(ssl.PROTOCOL_TLS_SERVER)
        for identity in self._identities:
            accepting.load_verify_locations(cadata=identity.certificate)
        accepting.sni_callback = choose
        return accepting


def certified_names(connected: ssl.SSLSocket) -> frozenset[str]:
    """Return the DNS and URI names of the peer's verified certificate, and its common name."""
    certificate: Mapping[str, object] = connected.getpeercert() or {}
    subjects = [pair for part in certificate.get("subject", ()) for pair in part]  # type: ignore[attr-defined]
    names = [*certificate.get("subjectAltName", ()), *subjects]  # type: ignore[misc]
    return frozenset(name for kind, name in names if kind in ("DNS", "URI", "commonName"))


def _send_tls_alert(accepted: ssl.SSLSocket) -> None:
    """Send a TLS alert to a client that does not use TLS, to show why it is rejected.

    OpenSSL itself sends no alert to such a client.
    """
    with suppress(OSError):
        socket.socket.send(accepted, _HANDSHAKE_FAILURE)
        accepted.setblocking(False)
        socket.socket.recv(accepted, 1 << 16)  # unread data would reset the connection


def not_the_secret(got: object) -> AtlasError:
    """Return the error for two ends that do not have the same secret."""
    hint = "Pass the same secret= to both ends, or tls= with the same certificate authority"
    return AtlasError(Code.BAD_SIGNATURE, got=got, hint=hint)


def _bad_secret(problem: str, got: str, hint: str) -> AtlasError:
    return AtlasError(Code.BAD_SECRET, problem, got=got, hint=hint)


def _checked_secrets(secret: Secret) -> tuple[bytes, ...]:
    """Return the secrets as a tuple, or raise an error, which never contains a secret."""
    if secret is None:
        return ()
    secrets = tuple(secret) if isinstance(secret, list | tuple) else (secret,)
    for one in secrets:
        if not isinstance(one, bytes) or len(one) < MIN_SECRET_BYTES:
            got = f"{len(one)} bytes" if isinstance(one, bytes) else f"a {type(one).__name__}"
            hint = "Make one with secrets.token_bytes(32), and give it to all nodes as bytes"
            raise _bad_secret("", got, hint)
    hint = "Pass one secret, or (new, old) during a rotation"
    if not 1 <= len(secrets) <= _MAX_SECRETS:
        problem = f"A node must have 1 to {_MAX_SECRETS} secrets"
        raise _bad_secret(problem, f"{len(secrets)} secrets", hint)
    if len(set(secrets)) < len(secrets):
        problem = "The secrets of a node must be different"
        raise _bad_secret(problem, "one secret several times", hint)
    return secrets


def _peer_identities(
    peers: Mapping[str, PeerAccess], secret: Secret, tls: TlsContexts | None
) -> tuple[SecretIdentity, ...]:
    """Check `peers`, and return one identity for each of their secrets.

    With `tls` the result is empty, because the peers then have certificates instead of secrets.
    """
    hint = "Give each peer a different secret: peers={name: PeerAccess(secret)}"
    if secret is not None:
        raise _bad_secret("A node cannot have both secret= and peers=", "peers= and secret=", hint)
    if not 1 <= len(peers) <= _MAX_PEERS:
        problem = f"peers= must have 1 to {_MAX_PEERS:,} peers"
        raise _bad_secret(problem, f"{len(peers):,} peers", hint)
    owned = [(one, name) for name, own in peers.items() for one in _checked_secrets(own.secret)]
    if tls is not None and owned:
        problem = "Peers cannot have secrets if the node has tls="
        raise _bad_secret(
            problem, "tls=, and secrets in peers=", "Pass PeerAccess() without secret"
        )
    missing = [name for name, own in peers.items() if own.secret is None]
    if tls is None and missing:
        got = f"no secret for {missing[:8]}"
        raise _bad_secret("Each peer must have a secret", got, f"{hint}, or pass tls=")
    if len({one for one, _ in owned}) < len(owned):
        problem = "Each peer must have a different secret"
        raise _bad_secret(problem, "one secret for several peers", hint)
    return tuple(SecretIdentity(one, name) for one, name in owned)


def _check_contexts(tls: TlsContexts, secret: Secret) -> None:
    """Raise an error if a TLS context does not verify peers, or if there is also a secret."""
    if not isinstance(tls, TlsContexts):
        problem, hint = "tls= must be a TlsContexts object", "Pass TlsContexts(server, client)"
        raise _bad_secret(problem, f"a {type(tls).__name__}", hint)
    if secret is not None:
        problem, hint = "A node cannot have both secret= and tls=", "Omit secret= or tls="
        raise _bad_secret(problem, "tls= and secret=", hint)
    for end, context in (("server", tls.server), ("client", tls.client)):
        if context.verify_mode != ssl.CERT_REQUIRED:
            problem = "Both TLS contexts must verify the certificate of the other end"
            got = f"the {end} context with verify_mode {context.verify_mode.name}"
            raise _bad_secret(problem, got, f"Set tls.{end}.verify_mode = ssl.CERT_REQUIRED")
