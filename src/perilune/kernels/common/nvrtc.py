"""CUDA C++ for NVIDIA GPUs, compiled at first use by NVRTC, the compiler that comes with torch.

No toolkit is installed, and no header of one is read. Machine code is kept on disk: compiling takes
a processor some seconds, and every process would do it anew.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from perilune.core.env import cache_dir
from perilune.core.whole_file import write_whole
from perilune.kernels.common.errors import CompileError
from perilune.kernels.common.triton_math import is_hopper

log = logging.getLogger(__name__)

HOPPER = "sm_90a"
"""The architecture with the products of warp groups, which later GPUs do not have."""


def is_installed() -> bool:
    """Whether `cuda-bindings` is, found without an import of it."""
    # Other distributions bring a package of this name, too.
    return find_spec("cuda") is not None and find_spec("cuda.bindings") is not None


def serves(device: torch.device, otherwise: str) -> bool:
    """Whether programs for `HOPPER` run on `device`: on Hopper alone, if `cuda-bindings` is there.
    Where only that is missing, a warning says what is done `otherwise`."""
    if not is_hopper(device):
        return False
    if not is_installed():
        log.warning("cuda-bindings is not installed: %s on %s", otherwise, device)
        return False
    return True


def cubin(source: Path, headers: tuple[Path, ...], defined: Mapping[str, int], arch: str) -> bytes:
    """Machine code of `source` for the architecture `arch` ("sm_90a"), with what is `defined`.

    Where it cannot be kept, or be read, it is compiled and a warning says so, once.

    Raises:
        CompileError: the source is not accepted, or NVRTC fails.
    """
    nvrtc: Any = import_module("cuda.bindings.nvrtc")
    options = [f"--gpu-architecture={arch}", "--std=c++17"]
    options += [f"--define-macro={name}={value}" for name, value in defined.items()]
    version = ".".join(map(str, _done(nvrtc, nvrtc.nvrtcVersion())))
    kept = cache_dir() / "cubin" / f"{source.stem}-{_digest(source, headers, options, version)}"
    try:
        return kept.read_bytes()
    except FileNotFoundError:
        code = _compiled(nvrtc, source, headers, options)
    except OSError as error:
        _warn_once(kept.parent, str(error))
        return _compiled(nvrtc, source, headers, options)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_whole(kept, code)
    except OSError as error:
        _warn_once(kept.parent, str(error))
    return code


@cache
def _warn_once(folder: Path, why: str) -> None:
    log.warning("machine code is not kept in %s, every process compiles it anew: %s", folder, why)


def _compiled(nvrtc: Any, source: Path, headers: tuple[Path, ...], options: list[str]) -> bytes:
    texts, names = [x.read_bytes() for x in headers], [x.name.encode() for x in headers]
    made = nvrtc.nvrtcCreateProgram(
        source.read_bytes(), source.name.encode(), len(headers), texts, names
    )
    program = _done(nvrtc, made)[0]
    try:
        given = [option.encode() for option in options]
        status = nvrtc.nvrtcCompileProgram(program, len(given), given)
        if status[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = b" " * _done(nvrtc, nvrtc.nvrtcGetProgramLogSize(program))[0]
            _done(nvrtc, nvrtc.nvrtcGetProgramLog(program, log))
            raise CompileError(f"{source.name} does not compile: {log.decode().rstrip(chr(0))}")
        code = b" " * _done(nvrtc, nvrtc.nvrtcGetCUBINSize(program))[0]
        _done(nvrtc, nvrtc.nvrtcGetCUBIN(program, code))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return code


def _done(nvrtc: Any, answer: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a call answers behind its status."""
    status, *values = answer
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"NVRTC: {status.name}")
    return tuple(values)


def _digest(source: Path, headers: tuple[Path, ...], options: list[str], version: str) -> str:
    digest = hashlib.sha256("\0".join([*options, version]).encode())
    for file in (source, *headers):
        digest.update(b"\0" + file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]
