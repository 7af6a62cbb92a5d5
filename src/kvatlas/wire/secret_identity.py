"""The private key and the certificate that both ends derive from a shared secret."""

from __future__ import annotations

import datetime
import hashlib
import os
import ssl
from functools import cached_property
from typing import NamedTuple

from kvatlas.errors import MissingExtraError


class PeerIdentity(NamedTuple):
    """The authenticated identity of the other end of a connection."""

    account: str
    """The key under which quotas count the peer: its name, certificate or host."""
    names: frozenset[str] | None = None
    """The node names that the peer's key proves; None if the peer may use any name."""


class SecretIdentity:
    """The key and certificate that are derived from one secret, and TLS contexts that use both."""

    def __init__(self, secret: bytes, owner: str | None = None) -> None:
        self._owner = owner
        self.certificate, self._key = _certificate(secret)
        """The certificate, in DER, and the private key; equal at all ends."""
        self.name = hashlib.sha256(b"kvatlas name" + self.certificate).hexdigest()[:32]
        """The name by which clients select the secret: a hash of its public certificate."""

    def peer(self, host: str) -> PeerIdentity:
        """Return the identity of a peer that has proved that it has the secret."""
        if self._owner is None:
            return PeerIdentity(host)
        return PeerIdentity(f"peer {self._owner}", frozenset([self._owner]))

    @cached_property
    def server(self) -> ssl.SSLContext:
        """The TLS context that accepts connections with this secret."""
        return self._trusting(ssl.PROTOCOL_TLS_SERVER)

    @cached_property
    def client(self) -> ssl.SSLContext:
        """The TLS context that opens connections with this secret."""
        return self._trusting(ssl.PROTOCOL_TLS_CLIENT)

    def _trusting(self, protocol: int) -> ssl.SSLContext:
        context = tls_context(protocol)
        context.load_verify_locations(cadata=self.certificate)
        # `load_cert_chain` needs a path. An anonymous memory file keeps the key off the disk.
        fd = os.memfd_create("kvatlas-key")
        try:
            os.write(fd, self._key + ssl.DER_cert_to_PEM_cert(self.certificate).encode())
            context.load_cert_chain(f"/proc/self/fd/{fd}")
        finally:
            os.close(fd)
        return context


def tls_context(protocol: int) -> ssl.SSLContext:
    """Return a context for TLS 1.3 that requires a certificate, and checks no host name."""
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0
    return context


def _certificate(secret: bytes) -> tuple[bytes, bytes]:
    """Return (certificate as DER, private key as PEM), which depend only on the secret."""
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
    # OpenSSL finds certificates by their subject, so each secret needs a different subject.
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
