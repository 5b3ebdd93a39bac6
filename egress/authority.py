"""The authority of an installation, which sessions with secrets trust, and its certificates for hosts.

The authority is made once, and its key kept with the secrets. A certificate of a host lasts for days and is kept in
memory; all have one key, made by each process anew. A context of TLS takes certificates from files alone, so they go
through a file in memory that is made before the process gives such calls away. Source: RFC 5280.
"""

from __future__ import annotations

import datetime
import os
import ssl
from collections import OrderedDict

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from egress.safe import AUTHORITY, Safe

ALPN = "http/1.1"
MAX_HOSTS = 256
"""Hosts whose certificates are kept."""

_DAYS, _RENEWED_DAYS, _AUTHORITY_DAYS = 7, 1, 3650
_EARLIER = datetime.timedelta(days=1)
"""Certificates begin a day before now: clocks inside may differ."""

_BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)
"""Bundles of authorities: Debian and others, Fedora, openSUSE, Alpine."""


class Authority:
    """Certificates for hosts, which pass through the file of `certificates_fd`. `kept`: key and certificate of the
    authority in PEM. Raises `ValueError`: they are damaged."""

    def __init__(self, kept: bytes, certificates_fd: int) -> None:
        key = serialization.load_pem_private_key(kept, None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError("the key of the authority is of another kind")
        self._key = key
        self._certificate = x509.load_pem_x509_certificate(kept)
        self._leaf_key = ec.generate_private_key(ec.SECP256R1())
        self._file = certificates_fd
        self._contexts: OrderedDict[str, tuple[datetime.datetime, ssl.SSLContext]] = OrderedDict()

    @property
    def certificate(self) -> str:
        """The authority's certificate, in PEM."""
        return self._certificate.public_bytes(serialization.Encoding.PEM).decode("ascii")

    def context_for(self, host: str) -> ssl.SSLContext:
        """Return a TLS context with a valid certificate for the host, made or kept from before."""
        now = datetime.datetime.now(datetime.UTC)
        kept = self._contexts.pop(host, None)
        if kept is None or kept[0] < now + datetime.timedelta(days=_RENEWED_DAYS):
            kept = now + datetime.timedelta(days=_DAYS), self._new_context(host, now)
        self._contexts[host] = kept
        if len(self._contexts) > MAX_HOSTS:
            self._contexts.popitem(last=False)
        return kept[1]

    def _new_context(self, host: str, now: datetime.datetime) -> ssl.SSLContext:
        pem = self._leaf(host, now).public_bytes(serialization.Encoding.PEM) + _private_pem(self._leaf_key)
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, pem, 0)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols([ALPN])
        context.load_cert_chain(f"/proc/self/fd/{self._file}")
        return context

    def _leaf(self, host: str, now: datetime.datetime) -> x509.Certificate:
        public = self._leaf_key.public_key()
        issuer_id = self._certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        return (
            x509.CertificateBuilder()
            .subject_name(x509.Name([]))  # a name may be longer than a common name; then the next one is critical
            .issuer_name(self._certificate.subject)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _EARLIER)
            .not_valid_after(now + datetime.timedelta(days=_DAYS))
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=True)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer_id), critical=False)
            .sign(self._key, hashes.SHA256())
        )


def outward_context(ca_file: str | None) -> ssl.SSLContext:
    """Return the context that checks servers: against the machine's authorities, and those of `ca_file`. Raises
    `OSError`: that can't be read."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # checks certificate and name
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols([ALPN])
    bundle = next((path for path in _BUNDLES if os.path.isfile(path)), None)
    if bundle is not None:  # all of it now: certificates looked for later would be out of reach
        context.load_verify_locations(bundle)
    else:
        context.load_default_certs()
    if ca_file is not None:
        context.load_verify_locations(ca_file)
    return context


def kept_authority(safe: Safe) -> bytes:
    """Return the key and the certificate of the installation's authority, which is made if there is none. Raises
    `OSError`."""
    kept = safe.read(AUTHORITY)
    if kept is None:
        kept = new_authority()
        safe.write(AUTHORITY, kept)
    return kept


def new_authority() -> bytes:
    """Return the key and the certificate of a new authority, in PEM."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    serial = x509.random_serial_number()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"sandkasten sessions {serial % 2**32:08x}")])
    public_id = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(serial)
        .not_valid_before(now - _EARLIER)
        .not_valid_after(now + datetime.timedelta(days=_AUTHORITY_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(public_id, critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(public_id), critical=False)
        .sign(key, hashes.SHA256())
    )
    return _private_pem(key) + certificate.public_bytes(serialization.Encoding.PEM)


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )
