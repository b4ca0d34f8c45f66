# Two images from one file: a coordinator without torch, and a worker.
#
#   docker build --target coordinator -t tessera-coordinator .
#   docker build --target worker -t tessera-worker .
#
# Both run as an unprivileged user on a read-only root file system; all they write is under /data. The coordinator serves
# TLS, or says that a proxy does so; with neither it does not start:
#
#   docker run --read-only --tmpfs /tmp -v tessera:/data -v /etc/tessera:/tls:ro -p 8470:8470 \
#     -e TESSERA_TLS_CERT=/tls/cert.pem -e TESSERA_TLS_KEY=/tls/key.pem tessera-coordinator
#   docker run --read-only --tmpfs /tmp -v tessera:/data --network proxy -e TESSERA_BEHIND_PROXY=true tessera-coordinator

FROM python:3.11-slim AS base
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PIP_NO_CACHE_DIR=1 PATH=/opt/tessera/bin:$PATH
RUN useradd --uid 10001 --create-home --home-dir /home/tessera tessera \
    && mkdir /data && chown tessera /data

FROM base AS build
WORKDIR /src
RUN python -m venv /opt/tessera
COPY pyproject.toml constraints.txt README.md ./
COPY shared shared
COPY migrations migrations
COPY coordinator coordinator
COPY worker worker

FROM build AS build-coordinator
RUN pip install '.[coordinator]'

FROM build AS build-worker
# On a machine with a GPU, build with --build-arg CONSTRAINTS=/dev/null and an index that has CUDA wheels.
ARG CONSTRAINTS=constraints.txt
RUN pip install --constraint "$CONSTRAINTS" '.[worker]'

FROM base AS coordinator
COPY --from=build-coordinator /opt/tessera /opt/tessera
ENV TESSERA_HOST=0.0.0.0 \
    TESSERA_DATABASE_URL=sqlite:////data/tessera.db \
    TESSERA_BLOB_URL=/data/blobs \
    TESSERA_STAGING_DIR=/data/staging
USER tessera
WORKDIR /data
VOLUME /data
EXPOSE 8470
# From inside, where the name in the certificate is another. With TESSERA_TLS_CLIENT_CA, give it a certificate to show.
HEALTHCHECK --interval=15s --timeout=5s --start-period=10s \
    CMD ["python", "-c", "import os, ssl, urllib.request as u; s = 's' if 'TESSERA_TLS_CERT' in os.environ else ''; u.urlopen(f'http{s}://127.0.0.1:8470/healthz/ready', timeout=4, context=ssl._create_unverified_context() if s else None)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["tessera", "coordinator"]
CMD ["serve", "--migrate"]

FROM base AS worker
COPY --from=build-worker /opt/tessera /opt/tessera
ENV TESSERA_WORKER_STATE_DIR=/data HF_HOME=/data/huggingface
USER tessera
WORKDIR /data
VOLUME /data
# The worker touches this file at every claim and heartbeat.
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s \
    CMD ["python", "-c", "import os, sys, time; sys.exit(time.time() - os.stat('/data/alive').st_mtime > 120)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["tessera", "worker"]
CMD ["run", "--config", "/etc/tessera/worker.toml"]
