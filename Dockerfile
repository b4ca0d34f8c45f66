# Two images from one file: a coordinator without torch, and a worker.
#
#   docker build --target coordinator -t tessera-coordinator .
#   docker build --target worker -t tessera-worker .
#
# Both run as an unprivileged user on a read-only root file system; all they write is under /data and /tmp. The
# coordinator serves TLS, or says that a proxy does so; with neither it does not start:
#
#   docker run --read-only --tmpfs /tmp -v tessera:/data -v /etc/tessera:/tls:ro -p 8470:8470 \
#     -e TESSERA_TLS_CERT=/tls/cert.pem -e TESSERA_TLS_KEY=/tls/key.pem tessera-coordinator
#   docker run --read-only --tmpfs /tmp -v tessera:/data --network proxy -e TESSERA_BEHIND_PROXY=true tessera-coordinator
#
# Neither has a compiler, pip, or this checkout in it. deploy/ and docs/deploying.md have the rest.

# Where a registry can be reached, `docker buildx imagetools inspect` shows the digest to append as @sha256:...
ARG BASE=python:3.11-slim-bookworm
FROM $BASE AS base
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PIP_NO_CACHE_DIR=1
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /tmp tessera \
    && mkdir /data && chown 10001:10001 /data

FROM base AS wheel
WORKDIR /src
COPY pyproject.toml README.md ./
COPY shared shared
COPY migrations migrations
COPY coordinator coordinator
COPY worker worker
COPY tessera tessera
COPY docs docs
RUN python -m pip wheel --no-deps --wheel-dir /wheel .

FROM base AS build
WORKDIR /src
# Without pip of its own, for what is copied on from here is to install nothing.
RUN python -m venv --without-pip /opt/tessera
COPY deploy/*.lock deploy/

FROM build AS build-coordinator
# With --build-arg EXTRAS=signing it signs dossiers.
ARG EXTRAS=
RUN python -m pip --python /opt/tessera/bin/python install --no-compile --require-hashes \
      --requirement deploy/requirements-coordinator.lock ${EXTRAS:+--requirement "deploy/requirements-$EXTRAS.lock"}
COPY --from=wheel /wheel /wheel
# An import leaves the compiled form of the modules that a coordinator uses: 25 MB, and 60 MB for all of them.
RUN python -m pip --python /opt/tessera/bin/python install --no-compile --no-deps /wheel/*.whl \
    && find /opt/tessera/lib -type d -name tests -prune -exec rm -r {} + \
    && PYTHONDONTWRITEBYTECODE='' /opt/tessera/bin/python -c "import tessera.coordinator.app, tessera.coordinator.cli, tessera.coordinator.server.http_limits, tessera.shared.cli.main"

FROM build AS build-worker
# PyPI's torch fetches the CUDA packages, gigabytes that an image for CPUs has no use for: for such an image, build with
# --build-arg TORCH_INDEX=URL, the index of PyTorch's builds for CPUs. The lock has the hashes of both builds; torch alone comes
# first, since pip prefers that of an index which states hashes.
ARG TORCH_INDEX=
# hadolint ignore=SC2046
RUN sed -n '/^torch==/,/[^\\]$/p' deploy/requirements-worker.lock > torch.lock \
    && python -m pip --python /opt/tessera/bin/python install --no-compile --require-hashes --no-deps \
      ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} --requirement torch.lock \
    && python -m pip --python /opt/tessera/bin/python install --no-compile --require-hashes \
      --requirement deploy/requirements-worker.lock $([ "$TORCH_INDEX" ] || echo --requirement deploy/requirements-cuda.lock)
COPY --from=wheel /wheel /wheel
# Without a compiler nothing can use torch's headers. `import torch` refuses to work without torch_shm_manager. An executor imports
# for 5 s with its modules compiled, and for 10 s without; their compiled form takes 80 MB, that of all modules 270 MB.
RUN python -m pip --python /opt/tessera/bin/python install --no-compile --no-deps /wheel/*.whl \
    && rm -rf /opt/tessera/lib/python3*/site-packages/torch/include /opt/tessera/lib/python3*/site-packages/torch/test \
    && find /opt/tessera/lib/python3*/site-packages/torch/bin -type f ! -name torch_shm_manager -delete \
    && find /opt/tessera/lib -type d -name tests -prune -exec rm -r {} + \
    && PYTHONDONTWRITEBYTECODE='' /opt/tessera/bin/python -c "import tessera.shared.cli.main, tessera.worker.cli.worker, tessera.worker.executor.rank"

FROM base AS final
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.version=$VERSION org.opencontainers.image.revision=$REVISION \
    org.opencontainers.image.documentation=docs/deploying.md
RUN python -m pip uninstall --yes pip setuptools wheel
# Here alone: the builds need the Python that has pip.
ENV PATH=/opt/tessera/bin:$PATH
# By number, so that who starts it can see that it is not root.
USER 10001:10001
WORKDIR /data
VOLUME /data
STOPSIGNAL SIGTERM

FROM final AS coordinator
LABEL org.opencontainers.image.title="Tessera coordinator" \
    org.opencontainers.image.description="Keeps runs, rounds and the global state of federated training"
COPY --from=build-coordinator /opt/tessera /opt/tessera
# The data are in /data/tessera/coordinator, unless settings name other places: no variable of the image could be unset for a
# TESSERA_DATABASE_URL_FILE.
ENV TESSERA_HOST=0.0.0.0 XDG_STATE_HOME=/data
EXPOSE 8470
# From inside, past any proxy, and where the name in the certificate is another. With TESSERA_TLS_CLIENT_CA, give it a certificate to show.
HEALTHCHECK --interval=15s --timeout=5s --start-period=10s \
    CMD ["python", "-c", "import os, ssl, urllib.request as u; s = 's' if 'TESSERA_TLS_CERT' in os.environ else ''; u.build_opener(u.ProxyHandler({}), u.HTTPSHandler(context=ssl._create_unverified_context())).open(f'http{s}://127.0.0.1:8470/healthz/ready', timeout=4)"]
ENTRYPOINT ["tessera", "coordinator"]
CMD ["serve", "--migrate"]

FROM final AS worker
LABEL org.opencontainers.image.title="Tessera worker" \
    org.opencontainers.image.description="Trains for a coordinator beside the data of one site"
COPY --from=build-worker /opt/tessera /opt/tessera
ENV TESSERA_WORKER_STATE_DIR=/data HF_HOME=/data/huggingface TORCHINDUCTOR_CACHE_DIR=/tmp/torch
# The worker touches this file once it has loaded its data, at every claim, and at least every 90 s during a task. A coordinator
# that is overloaded can ask it to wait 600 s between two claims.
HEALTHCHECK --interval=30s --timeout=5s --start-period=1h \
    CMD ["python", "-c", "import os, sys, time; sys.exit(time.time() - os.stat('/data/alive').st_mtime > 900)"]
ENTRYPOINT ["tessera", "worker"]
CMD ["run", "--config", "/etc/tessera/worker.toml"]
