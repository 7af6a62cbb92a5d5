"""Names of peers: bound to the key or certificate of their node, and what each may do."""

from __future__ import annotations

import datetime
import ssl
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from kvatlas.errors import AtlasError, Code
from kvatlas.wire import PeerAccess, Security, Session, TlsContexts
from tests.attack.plans import source_plan, target_plan
from tests.wire import data_plane
from tests.wire.data_plane import TOKENS, ranks
from tests.wire.faulty import failure, pull
from tests.wire.helpers import End, assert_arrived, ends, small

KEYS = {name: bytes([number]) * 32 for number, name in enumerate(("source", "reader", "other"))}


def end(name: str, seed: int = 2, **given: Any) -> End:
    return End(small("dense"), 50, seed=seed, name=name, **given)


def source(**access: Any) -> End:
    """A node that knows two peers, each by its own key."""
    peers = {name: PeerAccess(KEYS[name], **access) for name in ("reader", "other")}
    return end("source", 1, peers=peers)


def refused(of: End, there: End) -> Code:
    with pytest.raises(AtlasError) as refusal:
        Session(of.nodes[0], there.endpoints).close()
    return refusal.value.code


def test_a_name_is_accepted_only_with_its_own_key() -> None:
    own = {"source": PeerAccess(KEYS["reader"])}
    others = {"source": PeerAccess(KEYS["other"])}
    with ends(source(), end("reader", peers=own), end("reader", 3, peers=others)) as all_of_them:
        there, reader, liar = all_of_them
        there.offer("r", readers=["reader"])
        assert refused(liar, there) is Code.BAD_HANDSHAKE
        with Session(reader.nodes[0], there.endpoints) as session:
            pull(session, reader).wait(10)
        assert_arrived(there, reader, 0)


def test_a_key_that_no_peer_has_opens_nothing() -> None:
    unknown = {"source": PeerAccess(bytes(range(32)))}
    with ends(source(), end("reader", peers=unknown), end("reader", 3, secret=KEYS["other"])) as (
        there, stranger, of_one_secret,
    ):  # fmt: skip
        assert refused(stranger, there) is Code.BAD_SIGNATURE
        assert refused(of_one_secret, there) is Code.BAD_HANDSHAKE, "the key of another name"


def test_a_node_that_answers_under_another_name_is_refused() -> None:
    """The one who connects knows by the key who must be there."""
    wrong = {"somebody": PeerAccess(KEYS["reader"])}
    with ends(source(), end("reader", peers=wrong)) as (there, reader):
        assert refused(reader, there) is Code.BAD_HANDSHAKE


def test_keys_of_peers_rotate_as_other_secrets_do() -> None:
    new = bytes(range(40, 72))
    rotating = PeerAccess((new, KEYS["reader"]))
    for one, two in (
        (rotating, PeerAccess(KEYS["reader"])), (rotating, rotating), (PeerAccess(new), rotating),
    ):  # fmt: skip
        there = end("source", 1, peers={"reader": one})
        with ends(there, end("reader", peers={"source": two})) as (_, reader):
            Session(reader.nodes[0], there.endpoints).close()


@pytest.mark.parametrize("way", ["pull", "push"])
def test_a_peer_does_what_its_role_allows(way: str) -> None:
    own = {"source": PeerAccess(KEYS["reader"])}
    role = {"may_read": way != "pull", "may_push": way != "push"}
    with ends(source(**role), end("reader", peers=own)) as (there, reader):
        about: dict[str, Any] = {"source_blocks": reader.blocks, "tokens": 50}
        with Session(reader.nodes[0], there.endpoints) as session:
            there.nodes[0].expect("p", there.blocks, 50, source=reader.plan, pushers=["reader"])
            if way == "push":
                assert failure(session.push("p", **about)) is Code.FORBIDDEN
                there.nodes[0].forget("p")
                there.offer("r")
                pull(session, reader).wait(10)
                return
            session.push("p", **about).wait(10)
            there.offer("r")
            assert failure(pull(session, reader)) is Code.FORBIDDEN


def test_with_one_secret_names_are_what_peers_say() -> None:
    """The control, as the documentation says."""
    with ends(end("source", 1, secret=KEYS["other"]), end("anybody", secret=KEYS["other"])) as (
        there, here,
    ):  # fmt: skip
        Session(here.nodes[0], there.endpoints).close()


@pytest.mark.parametrize(
    "given",
    [
        {"peers": {}},
        {"peers": {"one": PeerAccess()}},
        {"peers": {"one": PeerAccess(b"short")}},
        {"peers": {"one": PeerAccess(bytes(16)), "two": PeerAccess(bytes(16))}},
        {"peers": {"one": PeerAccess(bytes(16))}, "secret": bytes(16)},
    ],
    ids=["nobody", "no key", "short", "shared", "both"],
)
def test_peers_that_prove_nothing_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(AtlasError) as refusal:
        Security(given.pop("secret", None), **given)
    assert refusal.value.code is Code.BAD_SECRET
    assert "bytes(16)" not in str(refusal.value)


# -- certificates ---------------------------------------------------------------------------


class Authority:
    """Signs certificates of nodes."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._key = folder, ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "authority")])
        made = self._built(self._name, self._key, [], ca=True)
        (folder / "ca.pem").write_bytes(made)

    def _built(self, subject: x509.Name, key: Any, names: list[Any], *, ca: bool) -> bytes:
        now = datetime.datetime.now(datetime.UTC)
        built = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        )
        if names:
            built = built.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return built.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def contexts(self, common: str, *names: Any) -> TlsContexts:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, common)])
        file = self._folder / f"{common}.pem"
        file.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
            + self._built(subject, key, list(names), ca=False)
        )
        made = []
        for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
            context = ssl.SSLContext(protocol)
            context.check_hostname, context.verify_mode = False, ssl.CERT_REQUIRED
            context.load_verify_locations(self._folder / "ca.pem")
            context.load_cert_chain(file)
            made.append(context)
        return TlsContexts(*made)


def test_a_name_must_be_in_the_certificate(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    dns, uri = x509.DNSName("reader-1"), x509.UniformResourceIdentifier("spiffe://fleet/reader-2")
    reader = authority.contexts("reader-0", dns, uri)
    there = end("source", 1, tls=authority.contexts("source"))
    names = "reader-0", "reader-1", "spiffe://fleet/reader-2", "source", "reader-3"
    with ends(there, *(end(name, 2 + n, tls=reader) for n, name in enumerate(names))) as all_ends:
        for one in all_ends[1:4]:
            Session(one.nodes[0], there.endpoints).close()
        for liar in all_ends[4:]:
            assert refused(liar, there) is Code.BAD_HANDSHAKE
            assert refused(there, liar) is Code.BAD_HANDSHAKE, "nor does it answer as another"


def test_data_connections_use_certificates_too(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    source, target = source_plan(TOKENS), target_plan(TOKENS)
    with (
        ranks((source, 1), secret=None, tls=authority.contexts("node-1")) as (there,),
        ranks((target, 7), secret=None, tls=authority.contexts("node-7")) as (here,),
        ranks((target, 8), secret=None, tls=Authority(tmp_path).contexts("node-8")) as (stranger,),
    ):
        there.offer("r", readers=["node-7"])
        with Session(here.node, [there.node.endpoint]) as session:
            data_plane.pull(session, here, checksums=True)
        data_plane.assert_arrived(here)
        with pytest.raises(AtlasError) as refusal:
            Session(stranger.node, [there.node.endpoint])
        assert refusal.value.code is Code.BAD_SIGNATURE, "the certificate of another authority"


def test_roles_by_certificate(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    peers = {"reader": PeerAccess(may_push=False), "pusher": PeerAccess(may_read=False)}
    there = end("source", 1, tls=authority.contexts("source"), peers=peers)
    tls = {name: authority.contexts(name) for name in ("reader", "pusher", "stranger")}
    with ends(there, *(end(name, 2 + n, tls=tls[name]) for n, name in enumerate(tls))) as made:
        _, reader, pusher, stranger = made
        assert refused(stranger, there) is Code.BAD_HANDSHAKE
        there.offer("r")
        with Session(pusher.nodes[0], there.endpoints) as session:
            assert failure(pull(session, pusher)) is Code.FORBIDDEN
        with Session(reader.nodes[0], there.endpoints) as session:
            pull(session, reader).wait(10)
        assert_arrived(there, reader, 0)
