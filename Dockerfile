# syntax=docker/dockerfile:1
#
#   docker build --target cpu  -t quire:cpu  --build-arg TORCH_INDEX=<URL of PyTorch's CPU wheels> .
#   docker build --target cuda -t quire:cuda .
#   docker run -p 127.0.0.1:8000:8000 quire:cpu demo
#   docker run -p 127.0.0.1:8000:8000 --gpus all -v quire-cache:/cache quire:cuda Qwen/Qwen3-0.6B
#
# The arguments after the image name are the model and the flags of `quire serve`.

ARG PYTHON=3.12

# ---- base of both targets

FROM python:${PYTHON}-slim-bookworm AS base
ENV PYTHONUNBUFFERED=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/quire
ENV PATH=/opt/quire/bin:$PATH
WORKDIR /src

# ---- torch in a separate layer: it is by far the largest part and rarely changes

FROM base AS build-cpu
# URL of PyTorch's index of CPU wheels. Without it, torch includes several gigabytes of GPU libraries.
ARG TORCH_INDEX=
COPY constraints.txt ./
RUN pip install --no-deps --constraint constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY src src
RUN pip install --constraint constraints.txt .

FROM base AS build-cuda
COPY constraints.txt ./
RUN pip install --constraint constraints.txt torch
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY src src
RUN pip install --constraint constraints.txt .

# ---- runtime: without root, and without build tools except the C compiler that kernels need on first use

FROM python:${PYTHON}-slim-bookworm AS run
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 10001 --create-home quire && install -d -o quire -g quire /cache && ln -s /cache /home/quire/.cache
ENV PATH=/opt/quire/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HF_HOME=/cache/huggingface \
    TRITON_CACHE_DIR=/cache/triton
WORKDIR /home/quire
EXPOSE 8000
# Start-up may have to download the model first.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["quire", "serve", "--host", "0.0.0.0", "--port", "8000"]
CMD ["demo"]

FROM run AS cuda
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=build-cuda /opt/quire /opt/quire
USER 10001

FROM run AS cpu
COPY --from=build-cpu /opt/quire /opt/quire
USER 10001
