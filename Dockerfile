# rayfed in an image, for cluster.yaml, for Kubernetes (docs/cluster.md) or for one machine:
#
#   docker build -t my-registry/rayfed .                                # CPU
#   docker build -t my-registry/rayfed:cuda --build-arg TORCH=cu126 .   # GPUs: PyTorch brings CUDA, the node its driver
#   docker run --rm --shm-size 4g -v "$PWD/runs:/work/runs" my-registry/rayfed rayfed launch noniid
#
# Ray keeps its objects in /dev/shm: give it a few GB. There is no entry point, because Ray's autoscaler runs `bash` in
# the image, and KubeRay a shell; both start Ray by `ray start`.
ARG PYTHON=3.12
FROM python:${PYTHON}-slim

# PyTorch's index: cpu, or a version of CUDA.
ARG TORCH=cpu
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1
# KubeRay's probes call wget, Ray's autoscaler copies files by rsync. Their versions are those of the base image's Debian.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends rsync wget && rm -rf /var/lib/apt/lists/*
RUN pip install "torch>=2.6" "torchvision>=0.21" --index-url "https://download.pytorch.org/whl/${TORCH}"

COPY pyproject.toml README.md LICENSE /src/
COPY rayfed /src/rayfed
COPY actors /src/actors
COPY scenarios /src/scenarios
COPY reproductions /src/reproductions
RUN pip install "/src[all]" && rayfed --version && rm -r /src

# The autoscaler reads HOME from the image, and mounts the token below it.
RUN useradd --create-home --uid 1000 ray && mkdir /home/ray/.ray /work && chown ray /home/ray/.ray /work
ENV HOME=/home/ray
USER 1000
WORKDIR /work
CMD ["rayfed", "--help"]
