# `etude serve` on a CPU. It asks for a key, and keeps models in /models and its store in /data:
#
#   docker build --tag etude --build-arg TORCH_INDEX=… .
#   docker run --init --publish 127.0.0.1:8000:8000 --env SERVER_KEY --volume models:/models --volume data:/data etude MODEL
FROM python:3.11-slim AS build
# PyTorch's index of builds for CPUs (--build-arg TORCH_INDEX=…). Without it comes one with CUDA, several GB.
ARG TORCH_INDEX
WORKDIR /build
COPY constraints.txt ./
RUN python -m venv /opt/etude && \
    /opt/etude/bin/pip install --no-cache-dir --constraint constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch
COPY pyproject.toml README.md LICENSE ./
COPY examples examples
COPY src src
RUN /opt/etude/bin/pip install --no-cache-dir --constraint constraints.txt '.[server]'

FROM python:3.11-slim
RUN useradd --create-home --uid 1000 etude && install --directory --owner etude --group etude --mode 700 /models /data
COPY --from=build /opt/etude /opt/etude
ENV PATH=/opt/etude/bin:$PATH HF_HOME=/models PYTHONUNBUFFERED=1
USER 1000
WORKDIR /data
VOLUME ["/models", "/data"]
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s --start-period=5m \
  CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["etude", "serve", "--host", "0.0.0.0", "--port", "8000", "--api-key-env", "SERVER_KEY", "--data-dir", "/data"]
CMD ["HuggingFaceTB/SmolLM2-135M-Instruct"]
