"""Put first on PYTHONPATH: lets vLLM's model runner V2 run on a CPU, its Triton kernels in Triton's interpreter.

For tests alone. Python imports a module of this name at start-up, so every worker process of vLLM gets it. With
``TRITON_INTERPRET=1`` it registers a CPU backend that says it is active, and fills two gaps of the interpreter: masks
of integers, and ``libdevice.log1p``.
"""

import os
from importlib.util import find_spec

if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None:
    import numpy as np
    import torch
    import triton.backends
    import triton.language as tl
    import triton.language.extra.libdevice as libdevice
    import triton.runtime
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase
    from triton.runtime import interpreter

    class Device:
        """What callers ask torch.cuda for, answered for the CPU."""

        def __init__(self, *args: object) -> None:
            pass

        def __enter__(self) -> None:
            pass

        def __exit__(self, *args: object) -> None:
            pass

    class InterpretingDriver(DriverBase):
        def __init__(self) -> None:
            super().__init__()
            self.get_device_capability = lambda device=None: (0, 0)
            self.get_current_device = lambda: 0
            self.set_current_device = lambda device: None
            self.get_current_stream = lambda device=None: 0

        @classmethod
        def is_active(cls) -> bool:
            return True

        def map_python_to_cpp_type(self, ty: str) -> str:
            return ty

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cpu", 0, 0)

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

        def get_device_interface(self) -> object:
            return torch.cpu

        def get_benchmarker(self) -> object:
            return lambda call, **options: [0.0, 0.0, 0.0]

        def get_empty_cache_for_benchmark(self) -> torch.Tensor:
            return torch.zeros(1)

        def clear_cache(self, cache: torch.Tensor) -> None:
            pass

    triton.backends.backends["cpu"] = triton.backends.Backend(None, InterpretingDriver)
    triton.runtime.driver.set_active(InterpretingDriver())

    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def as_mask(mask: object) -> object:
        return interpreter.TensorHandle(mask.data.astype(np.bool_), tl.int1)  # type: ignore[attr-defined]

    def masked_load(self, ptrs, mask, *rest):  # type: ignore[no-untyped-def]
        return load(self, ptrs, as_mask(mask), *rest)

    def masked_store(self, ptrs, value, mask, *rest):  # type: ignore[no-untyped-def]
        return store(self, ptrs, value, as_mask(mask), *rest)

    builder.create_masked_load, builder.create_masked_store = masked_load, masked_store

    def log1p(x, _semantic=None):  # type: ignore[no-untyped-def]
        """By numpy, elementwise, as the device library would."""
        return tl.tensor(interpreter.TensorHandle(np.log1p(x.handle.data), x.handle.dtype), x.type)

    libdevice.log1p = log1p
