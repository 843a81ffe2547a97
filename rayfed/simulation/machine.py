"""Processor and device of a process, and the arithmetic that a scenario selects."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from rayfed.core.simulated_gpus import VARIABLE, simulated_gpus
from rayfed.errors import NotPortable, ResourceError
from rayfed.simulation.gpus import visible_gpus

PORTABLE = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_CBWR": "AVX2",
    "OPENBLAS_CORETYPE": "Haswell",
    # includes the names of several numpy versions, which ignore unknown names
    "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL AVX512_SPR",
}
"""Environment variables for arithmetic with AVX2 only; libraries read them when they are loaded."""


class Machine(NamedTuple):
    """Processor, device and instruction set of a process."""

    role: str
    """Role of the process, such as `ClientActor`."""
    processor: str
    """Model of the processor, its vendor, and the instruction set that PyTorch uses."""
    device: str
    """`cpu`, or the name of the GPU."""


def this_machine(role: str, device: torch.device) -> Machine:
    """Return the processor, instruction set and device of this process, which computes on `device`."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return Machine(role, _processor(), name)


def _processor() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    said = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    model = said.get("model name") or platform.processor() or platform.machine()
    vendor = said.get("vendor_id") or said.get("CPU implementer") or platform.machine()
    return f"{model} ({vendor}, {torch.backends.cpu.get_cpu_capability()})"


def check_arithmetic(deterministic: str) -> None:
    """Check that this process uses the arithmetic (instruction set) that `resources.deterministic` selects.

    Raises `NotPortable` if the process was started without `PORTABLE`, and `ResourceError` if that has no effect.
    """
    if deterministic != "portable":
        return
    if any(os.environ.get(name) != value for name, value in PORTABLE.items()):
        variables = " ".join(f"{name}='{value}'" for name, value in PORTABLE.items())
        raise NotPortable(
            "resources.deterministic: portable must be set before Python loads PyTorch, but this process was "
            f"started without this setting: use the command `rayfed`, or start Python and Ray with {variables}"
        )
    if (used := torch.backends.cpu.get_cpu_capability()) != "AVX2":
        raise ResourceError(
            f"resources.deterministic: portable needs AVX2, but PyTorch uses {used} on {_processor()}: "
            "the processor has no AVX2, or PyTorch was loaded before the environment was set; "
            "remove resources.deterministic"
        )


def device_for(num_gpus: float | Literal["auto"]) -> torch.device:
    """Return the PyTorch device for a share of `num_gpus` GPUs. Raises `ResourceError` if PyTorch finds no GPU.

    `auto` is a GPU if PyTorch has one.
    """
    if not num_gpus or simulated_gpus() or (num_gpus == "auto" and not visible_gpus()):
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda")
    built = (
        f"is built for CUDA {torch.version.cuda} and finds no GPU" if torch.version.cuda else "is built without CUDA"
    )
    raise ResourceError(
        f"resources: num_gpus: {num_gpus} needs a GPU, but PyTorch {torch.__version__} {built} on "
        f"{platform.node()}: set num_gpus to 0 for the CPU, or install the GPU's driver and a CUDA build of PyTorch "
        f"(if Ray's GPUs are simulated, set {VARIABLE})"
    )


@contextmanager
def gpu_arithmetic(tf32: bool) -> Iterator[None]:
    """Set deterministic GPU arithmetic (with TF32 if `tf32` is true) within the block, and restore the old settings."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32
    try:
        set_gpu_arithmetic(tf32)
        yield
    finally:
        cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32 = before


def set_gpu_arithmetic(tf32: bool) -> None:
    """Make GPUs use deterministic algorithms, with TF32 only if `tf32` is true."""
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = tf32
