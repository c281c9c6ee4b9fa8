"""What may go wrong with kernels in CUDA C++.

ConfigError
└── CudaError
    ├── CompileError   NVRTC does not accept a source
    └── DriverError    the driver refuses a call
"""

from perilune.core.errors import ConfigError


class CudaError(ConfigError):
    """A kernel in CUDA C++ cannot be had, or be run."""


class CompileError(CudaError):
    """The message names the source and is the compiler's own."""


class DriverError(CudaError):
    """The message names the call and the driver's error."""
