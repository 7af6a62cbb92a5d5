"""Authentication on the side channel: TLS 1.3 between ends that share a secret.

From each shared secret both ends derive the same private key and the same self-signed certificate.
A connection uses one secret: the client names it by its certificate, and both ends present that
certificate and accept no other. Each end thereby proves that it has the secret, and no third party
can read, change, or replay the traffic. An end may accept several secrets during a rotation. Users
with a public key infrastructure pass TLS contexts instead.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import socket
import ssl
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

from kvatlas.errors import AtlasError, Code, MissingExtraError
from kvatlas.wire.fork_safety import close_in_children

Secret = bytes | Sequence[bytes] | None
"""A shared secret, or several during a rotation, the preferred one first."""

MIN_SECRET_BYTES = 16
_MAX_SECRETS = 4
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


class Security:
    """How a node's connections are protected: by secrets, by TLS contexts, or not at all.

    >>> Security().protected, Security(b"0123456789abcdef").protected
    (False, True)
    >>> Security("0123456789abcdef")  # doctest: +NORMALIZE_WHITESPACE
    Traceback (most recent call last):
    kvatlas.errors.AtlasError: A shared secret must be a bytes object of at least 16 bytes.
    Got a str.
    Make one with secrets.token_bytes(32), and give it to all nodes as bytes. [bad_secret]
    """

    def __init__(self, secret: Secret = None, *, tls: TlsContexts | None = None) -> None:
        self._tls = tls
        if tls is not None:
            _check_contexts(tls, secret)
        self._identities = tuple(_Identity(one) for one in _checked_secrets(secret))
        for identity in self._identities:
            identity.certificate  # noqa: B018  # what cannot be made is said now, not later
        self._accepting = self._make_accepting()

    @property
    def protected(self) -> bool:
        """Whether connections are authenticated."""
        return self._accepting is not None

    @property
    def choices(self) -> int:
        """The number of ways to open a connection: one per secret."""
        return max(1, len(self._identities))

    def wrap(self, accepted: socket.socket) -> socket.socket:
        """Wrap an accepted connection for its TLS handshake."""
        if self._accepting is None:
            return accepted
        return self._accepting.wrap_socket(
            accepted, server_side=True, do_handshake_on_connect=False
        )

    def identify(self, accepted: socket.socket) -> str:
        """Complete the handshake within the socket's time-out, and return the peer's identity.

        All holders of a secret have the same certificate, so they are distinguished by host.
        """
        host = str(accepted.getpeername()[0])
        if not isinstance(accepted, ssl.SSLSocket):
            return host
        try:
            accepted.do_handshake()
        except ssl.SSLError as problem:
            _say_tls(accepted)
            unknown = problem.reason == "CALLBACK_FAILED"  # the one that chooses by name
            raise not_the_secret("a different secret" if unknown else problem.reason) from None
        certificate = accepted.getpeercert(binary_form=True) or b""
        if self._tls is not None:
            return hashlib.sha256(certificate).hexdigest()
        chosen = [one for one in self._identities if one.server is accepted.context]
        if not chosen or chosen[0].certificate != certificate:
            raise not_the_secret("a certificate that does not match the secret")
        return host

    def open(self, connection: socket.socket, host: str, choice: int) -> socket.socket:
        """Open a protected connection with the chosen secret or context."""
        if self._tls is not None:
            protected = _connected(self._tls.client, connection, host)
        elif not self._identities:
            return connection
        else:
            identity = self._identities[choice]
            protected = _connected(identity.client, connection, identity.name)
            if protected.getpeercert(binary_form=True) != identity.certificate:
                protected.close()
                raise not_the_secret("a certificate that does not match the secret")
        return protected

    def _make_accepting(self) -> ssl.SSLContext | None:
        if self._tls is not None:
            # A connection that can be read has ended or was answered: no tickets in between.
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

        accepting = _context(ssl.PROTOCOL_TLS_SERVER)
        for identity in self._identities:
            accepting.load_verify_locations(cadata=identity.certificate)
        accepting.sni_callback = choose
        return accepting


def _connected(context: ssl.SSLContext, connection: socket.socket, name: str) -> ssl.SSLSocket:
    """Return a connection after its TLS handshake, and close it if the handshake fails."""
    # Wrapped first: a child that is forked during the handshake closes its copy too.
    protected = close_in_children(
        context.wrap_socket(connection, server_hostname=name, do_handshake_on_connect=False)
    )
    try:
        protected.do_handshake()
    except BaseException:
        protected.close()
        raise
    return protected


def _say_tls(accepted: ssl.SSLSocket) -> None:
    """Let a caller without TLS know what is spoken here, which OpenSSL leaves unsaid."""
    with suppress(OSError):
        socket.socket.send(accepted, _HANDSHAKE_FAILURE)
        accepted.setblocking(False)
        socket.socket.recv(accepted, 1 << 16)  # what is unread would make the end a reset


def not_the_secret(got: object) -> AtlasError:
    """The error for two ends that share no secret, or of which only one has a secret."""
    hint = "Give both ends the same secret, or the same certificate authority"
    return AtlasError(Code.BAD_SIGNATURE, got=got, hint=hint)


class _Identity:
    """The key and the certificate that follow from one secret, and TLS with them."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    @cached_property
    def name(self) -> str:
        """The name of the secret for clients: a hash of the certificate, which is public."""
        return hashlib.sha256(b"kvatlas name" + self.certificate).hexdigest()[:32]

    @property
    def certificate(self) -> bytes:
        """The certificate, in DER; equal at all ends."""
        return self._made[0]

    @cached_property
    def server(self) -> ssl.SSLContext:
        """Accepts connections that name this secret."""
        return self._trusting(ssl.PROTOCOL_TLS_SERVER)

    @cached_property
    def client(self) -> ssl.SSLContext:
        """Opens connections with this secret."""
        return self._trusting(ssl.PROTOCOL_TLS_CLIENT)

    @cached_property
    def _made(self) -> tuple[bytes, bytes]:
        return _certificate(self._secret)

    def _trusting(self, protocol: int) -> ssl.SSLContext:
        context = _context(protocol)
        context.load_verify_locations(cadata=self.certificate)
        # The key is loaded from memory that has no name: it is never in a file.
        fd = os.memfd_create("kvatlas-key")
        try:
            os.write(fd, self._made[1] + ssl.DER_cert_to_PEM_cert(self.certificate).encode())
            context.load_cert_chain(f"/proc/self/fd/{fd}")
        finally:
            os.close(fd)
        return context


def _context(protocol: int) -> ssl.SSLContext:
    """TLS 1.3 that demands a certificate; its key is the identity, not a host's name."""
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0
    return context


def _certificate(secret: bytes) -> tuple[bytes, bytes]:
    """(certificate in DER, private key in PEM) of a secret; the same bytes at every end."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    except ImportError as missing:
        raise MissingExtraError("cryptography", "wire") from missing
    derived = HKDF(hashes.SHA256(), 32, None, b"kvatlas side channel, Ed25519").derive(secret)
    key = Ed25519PrivateKey.from_private_bytes(derived)
    public = key.public_key().public_bytes_raw()
    # Certificates are looked up by their subject: those of two secrets must not share it.
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"kvatlas {public.hex()[:48]}")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC))
        .not_valid_after(datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, None)  # Ed25519 signs the same bytes with the same signature, always
    )
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return certificate.public_bytes(serialization.Encoding.DER), private


def _checked_secrets(secret: Secret) -> tuple[bytes, ...]:
    """The secrets as a tuple; anything else is refused, without showing any of it."""
    if secret is None:
        return ()
    secrets = tuple(secret) if isinstance(secret, list | tuple) else (secret,)
    for one in secrets:
        if not isinstance(one, bytes) or len(one) < MIN_SECRET_BYTES:
            got = f"{len(one)} bytes" if isinstance(one, bytes) else f"a {type(one).__name__}"
            raise AtlasError(
                Code.BAD_SECRET,
                got=got,
                hint="Make one with secrets.token_bytes(32), and give it to all nodes as bytes",
            )
    if not 1 <= len(secrets) <= _MAX_SECRETS or len(set(secrets)) < len(secrets):
        raise AtlasError(
            Code.BAD_SECRET,
            f"A node needs 1 to {_MAX_SECRETS} different secrets",
            got=f"{len(secrets)} secrets, {len(set(secrets))} of them different",
            hint="Pass one secret, or (new, old) during a rotation",
        )
    return secrets


def _check_contexts(tls: TlsContexts, secret: Secret) -> None:
    """Raise an error for contexts without verification, and for contexts with a secret."""
    if not isinstance(tls, TlsContexts):
        problem, hint = "tls must be a pair of TLS contexts", "Pass TlsContexts(server, client)"
        raise AtlasError(Code.BAD_SECRET, problem, got=f"a {type(tls).__name__}", hint=hint)
    contexts = tls.server, tls.client
    if secret is not None or any(one.verify_mode != ssl.CERT_REQUIRED for one in contexts):
        raise AtlasError(
            Code.BAD_SECRET,
            "TLS contexts must verify the other end, and replace a secret",
            got="tls= and secret=" if secret is not None else "a context without verification",
            hint="Set verify_mode to ssl.CERT_REQUIRED in both contexts, and omit secret=",
        )
