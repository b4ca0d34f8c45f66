"""The programs of docs/operating/proxies.md, started with its configurations."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import trustme

from tests.support.coordinator import until
from tests.support.paths import ROOT
from tests.support.processes import free_port

PAGE = ROOT / "docs" / "operating" / "proxies.md"
PATH = "/tessera"
HOST = "localhost"
NAME = "hospital.example"

PACKAGES = {"nginx": "nginx", "haproxy": "haproxy", "caddy": "caddy", "squid": "squid-openssl"}
FOREGROUND = {
    "nginx": ("-c",),
    "haproxy": ("-db", "-f"),
    "caddy": ("run", "--adapter", "caddyfile", "--config"),
    "squid": ("-N", "-f"),
}
AROUND = {
    "nginx": """
daemon off;
pid {folder}/pid;
error_log {folder}/error.log;
{user}
events {{}}
http {{
    access_log {folder}/access.log;
    client_body_temp_path {folder}/bodies;
    proxy_temp_path {folder}/answers;
    {block}
}}
""",
    "haproxy": "{block}",
    "caddy": "{{\n\tadmin off\n\tauto_https disable_redirects\n}}\n{block}",
    "squid": """
pid_filename {folder}/pid
cache_log {folder}/cache.log
access_log stdio:{folder}/access.log
hosts_file {folder}/hosts
coredump_dir {folder}
netdb_filename none
pinger_enable off
cache deny all
visible_hostname proxy.hospital.example
shutdown_lifetime 0 seconds
{block}
""",
}
"""What the test adds: where a program writes, and that it stays in the foreground."""


def block(program: str, number: int = 0) -> str:
    """A configuration as the page has it."""
    return re.findall(rf"```{program}\n(.*?)```", PAGE.read_text(), re.DOTALL)[number]


def installed(program: str) -> str:
    """The program's path. The test is skipped without it."""
    found = shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin")
    if found is None:
        pytest.skip(f"needs {program}: apt-get install {PACKAGES[program]}")
    return found


@dataclass(frozen=True)
class Folder:
    """A folder in place of /etc/tessera, with the files that the configurations name."""

    path: Path

    @property
    def files(self) -> dict[str, Path]:
        """A client's settings for TLS."""
        names = {"ca_bundle": "ca.pem", "client_cert": "client.pem", "client_key": "client.key"}
        return {setting: self.path / name for setting, name in names.items()}


@contextmanager
def folder() -> Iterator[Folder]:
    # Not pytest's: Squid leaves root, and then reads and writes here.
    with tempfile.TemporaryDirectory(prefix="tessera-proxies-") as name:
        made = Path(name)
        made.chmod(0o755)
        server, clients, inspection = trustme.CA(), trustme.CA(), trustme.CA(organization_name="North inspection")
        served = server.issue_cert(NAME, HOST, "127.0.0.1")
        server.cert_pem.write_to_path(made / "ca.pem")
        served.private_key_and_cert_chain_pem.write_to_path(made / "server.pem")
        served.private_key_pem.write_to_path(made / "server.key")
        clients.cert_pem.write_to_path(made / "clients-ca.pem")
        client = clients.issue_cert("worker@north.example")
        client.cert_chain_pems[0].write_to_path(made / "client.pem")
        client.private_key_pem.write_to_path(made / "client.key")
        inspection.cert_pem.write_to_path(made / "inspection-ca.pem")
        pem = inspection.private_key_pem.bytes() + inspection.cert_pem.bytes()
        (made / "inspection.pem").write_bytes(pem)
        (made / "hosts").write_text(f"127.0.0.1 {NAME}\n")
        yield Folder(made)


@dataclass(frozen=True)
class Running:
    port: int
    folder: Path

    @property
    def root(self) -> str:
        return f"https://{HOST}:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.root}{PATH}"

    def logged(self) -> str:
        return "".join(file.read_text(errors="replace") for file in self.folder.glob("*.log"))


@contextmanager
def proxy(program: str, configuration: str, at: Folder, upstream: str = "", port: int = 0) -> Iterator[Running]:
    """A program with a configuration of the page: on a free port, in this folder, before this coordinator. Squid's
    second port is that of what it connects to."""
    path, own = installed(program), free_port()
    listening = "3128" if program == "squid" else "443"
    text = configuration.replace("127.0.0.1:8470", urlsplit(upstream).netloc).replace("/etc/tessera", str(at.path))
    if program == "caddy":
        text = text.replace(f"https://{NAME}", f"https://{HOST}:{own}, https://{NAME}:{own}")
    text = re.sub(rf"\b{listening}\b", str(own), text)
    text = re.sub(r"\b443\b", str(port), text) if port else text
    user = "user root;" if os.geteuid() == 0 else ""
    with tempfile.TemporaryDirectory(dir=at.path) as name:
        around = AROUND[program].format(folder=name, user=user, block=text)
        (file := Path(name) / "conf").write_text(around.replace(f"{name}/hosts", f"{at.path}/hosts"))
        if program == "squid" and os.geteuid() == 0:
            for each in (at.path, *at.path.rglob("*")):
                shutil.chown(each, "proxy")
        home = {"XDG_DATA_HOME": name, "XDG_CONFIG_HOME": name}
        with (Path(name) / "said.log").open("wb") as said:
            process = subprocess.Popen(
                [path, *FOREGROUND[program], str(file)],
                env={**os.environ, **home},
                stdout=said,
                stderr=subprocess.STDOUT,
            )
        running = Running(own, Path(name))
        try:
            until(lambda: process.poll() is not None or _listens(own))
            assert process.poll() is None, running.logged()
            yield running
        finally:
            process.terminate()
            process.wait(30)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
