# rayfed in an image, for a Ray cluster on Kubernetes (docs/cluster.md) or one machine:
#
#   docker build -t rayfed .                                   # CPU
#   docker build -t rayfed:cuda --build-arg TORCH=cu126 .      # GPUs: PyTorch brings CUDA, the node its driver
#   docker run --rm --shm-size 4g -v "$PWD/runs:/work/runs" rayfed launch noniid
#
# Ray keeps its objects in /dev/shm: give it a few GB. KubeRay starts Ray itself, by `ray start` in a shell.
ARG PYTHON=3.12
FROM python:${PYTHON}-slim

# PyTorch's index: cpu, or a version of CUDA.
ARG TORCH=cpu
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1
# KubeRay's probes call wget. Its version is that of the base image's Debian.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends wget && rm -rf /var/lib/apt/lists/*
RUN pip install "torch>=2.6" "torchvision>=0.21" --index-url "https://download.pytorch.org/whl/${TORCH}"

COPY pyproject.toml README.md LICENSE /src/
COPY rayfed /src/rayfed
COPY actors /src/actors
COPY scenarios /src/scenarios
COPY reproductions /src/reproductions
RUN pip install "/src[hub]" && rayfed --version && rm -r /src

RUN useradd --create-home --uid 1000 ray && mkdir /work && chown ray /work
USER 1000
WORKDIR /work
ENTRYPOINT ["rayfed"]
CMD ["--help"]
