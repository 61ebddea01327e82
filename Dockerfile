# Two images from one file:
#   docker build --target cpu  -t tokenmill:cpu  .
#   docker build --target cuda -t tokenmill:cuda .    (run with --gpus all; needs NVIDIA's container toolkit)
ARG PYTHON=3.12

# The wheel of this source. The compiler stays behind here.
FROM python:${PYTHON}-slim-bookworm AS wheel
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY requirements/runtime.txt requirements/
RUN pip install --no-cache-dir --constraint requirements/runtime.txt cmake nanobind ninja scikit-build-core
COPY LICENSE README.md pyproject.toml ./
COPY native native
COPY src src
RUN pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels .

FROM python:${PYTHON}-slim-bookworm AS base
RUN python -m venv /opt/tokenmill && useradd --system --uid 10001 --create-home tokenmill
ENV PATH=/opt/tokenmill/bin:$PATH \
    HF_HOME=/models \
    TOKENMILL_WEIGHT_CACHE_DIR=/models/packed \
    PYTHONUNBUFFERED=1
RUN mkdir /models && chown tokenmill /models
WORKDIR /opt/tokenmill
COPY requirements/runtime.txt requirements/torch.txt requirements/
VOLUME /models
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["tokenmill"]
CMD ["serve", "--host", "0.0.0.0"]

FROM base AS cuda
# Triton compiles the launchers of its kernels when a server starts.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir --requirement requirements/torch.txt
COPY --from=wheel /wheels /wheels
RUN pip install --no-cache-dir --no-deps /wheels/*.whl
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001

# Without torch: models of text, on native kernels.
FROM base AS cpu
RUN pip install --no-cache-dir --requirement requirements/runtime.txt
COPY --from=wheel /wheels /wheels
RUN pip install --no-cache-dir --no-deps /wheels/*.whl
USER 10001
