"""The certificate with which the coordinator serves TLS: its dates, names and order, and its renewal on disk."""

import ssl
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path

import structlog
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from tessera.coordinator.settings import CoordinatorSettings
from tessera.shared.diagnostics import Finding, fail, ok, reason_of, warn

log = structlog.get_logger()

EXPIRES_SOON = timedelta(days=30)


def examine(settings: CoordinatorSettings, now: datetime) -> Iterator[Finding]:
    """Yield the faults that clients would find in the served certificates, or else their names and expiry.

    `tls_cert` has to be usable with its key. Raises ValueError for a certificate that cannot be parsed.
    """
    assert settings.tls_cert  # noqa: S101 (for the types)
    chain = x509.load_pem_x509_certificates(settings.tls_cert.read_bytes())
    names = _names(chain[0])
    findings = [
        *_uses(settings.tls_cert, chain[0], names),
        *_order(settings.tls_cert, chain),
        *outdated(settings, now),
    ]
    ends = min(one.not_valid_after_utc for one in chain)
    yield from findings or [
        ok("tls", f"served with {settings.tls_cert} for {', '.join(names)} until {ends:%Y-%m-%d}")
    ]


def outdated(settings: CoordinatorSettings, now: datetime) -> Iterator[Finding]:
    """Yield the served certificates and CAs of clients that end soon or are not valid. Raises OSError, ValueError."""
    for file in filter(None, (settings.tls_cert, settings.tls_client_ca)):
        for one in x509.load_pem_x509_certificates(file.read_bytes()):
            yield from _dates(file, one, now)


def _names(certificate: x509.Certificate) -> list[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [str(name.value) for name in names if isinstance(name, x509.DNSName | x509.IPAddress)]


def _dates(file: Path, certificate: x509.Certificate, now: datetime) -> Iterator[Finding]:
    of = f"{file}: the certificate of {certificate.subject.rfc4514_string() or 'no subject'}"
    starts, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if ends <= now:
        yield fail("tls", f"{of} expired at {ends:%Y-%m-%d %H:%M} UTC", "Renew it: clients refuse the connection.")
    elif starts > now:
        remedy = "Check this machine's clock, or wait: clients refuse the connection until then."
        yield fail("tls", f"{of} is not valid before {starts:%Y-%m-%d %H:%M} UTC", remedy)
    elif ends - now < EXPIRES_SOON:
        yield warn("tls", f"{of} expires at {ends:%Y-%m-%d %H:%M} UTC", "Renew it: all clients stop on that day.")


def _uses(file: Path, certificate: x509.Certificate, names: Sequence[str]) -> Iterator[Finding]:
    if not names:
        remedy = "Have it issued with a subjectAltName: clients do not read the common name."
        yield fail("tls", f"{file}: the certificate has no host name or address", remedy)
    try:
        uses = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return
    if not {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE} & set(uses):
        yield fail("tls", f"{file}: the certificate is not for servers", "Have it issued with the use serverAuth.")


def _order(file: Path, chain: Sequence[x509.Certificate]) -> Iterator[Finding]:
    for one, issuer in pairwise(chain):
        if one.issuer != issuer.subject:
            detail = f"{file}: {issuer.subject.rfc4514_string()} did not issue the certificate before it"
            yield warn("tls", detail, "Order the file: the server's certificate, its issuer, the issuer's issuer.")


class CertificateFiles:
    """The files of the served certificate, its key and the clients' CAs, read again when they change."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        self._settings = settings
        files = (settings.tls_cert, settings.tls_key, settings.tls_client_ca)
        self._files = [file for file in files if file] if settings.tls_cert else []
        self._read_at = self._changed_at()
        self._warn()

    def refresh(self, context: ssl.SSLContext) -> None:
        """Have new connections use changed files. If they do not fit, the previous certificate stays in use."""
        changed_at = self._changed_at()
        if changed_at in (None, self._read_at):
            return
        self._read_at = changed_at
        certificate, key, authorities = self._settings.tls_cert, self._settings.tls_key, self._settings.tls_client_ca
        assert certificate  # noqa: S101 (for the types)
        try:
            # A certificate may be there before its key.
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authorities).load_cert_chain(certificate, key)
            context.load_cert_chain(certificate, key)
            if authorities:
                context.load_verify_locations(authorities)
        except OSError as fault:
            remedy = "Write the certificate and its key. The previous one is served until then."
            log.warning("coordinator.certificate_unusable", detail=reason_of(fault), remedy=remedy)
            return
        log.info("coordinator.certificate_renewed", file=str(certificate))
        self._warn()

    def _changed_at(self) -> list[int] | None:
        try:
            return [file.stat().st_mtime_ns for file in self._files]
        except OSError:
            return None

    def _warn(self) -> None:
        if not self._files:
            return
        try:
            findings = list(examine(self._settings, datetime.now(UTC)))
        except (OSError, ValueError) as fault:
            # OpenSSL accepts some certificates that cannot be parsed strictly.
            log.warning("coordinator.certificate", detail=str(fault), remedy="See `tessera coordinator doctor`.")
            return
        for finding in findings:
            if finding.verdict != "ok":
                log.warning("coordinator.certificate", detail=finding.detail, remedy=finding.remedy)
