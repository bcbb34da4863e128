"""Whether this machine has the GPU a bundle was compiled for: asked before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from clover_compile.runtime import cuda_driver
from clover_compile.runtime.cuda_driver import CudaError
from clover_compile.runtime.errors import WrongMachine

RESERVE = 512 * 2**20
"""Bytes that must stay free beside weights and state: buffers and graphs."""


@dataclass(frozen=True)
class GpuNeeds:
    """What the kernels and weights of a bundle ask of a machine."""

    target: str
    capability: int
    """Compute capability times ten; code for one runs on no other."""
    driver: int
    """CUDA release times a thousand that the driver must support, e.g. 12000."""
    held: int
    """Bytes of weights and of one state on the device."""

    def check(self, path: str) -> None:
        """Raises WrongMachine with both values for the bundle at `path`; then makes the GPU
        current."""
        gpu = f"an NVIDIA GPU of compute capability {self.capability / 10:.1f}"
        elsewhere = "build for this machine"
        if cuda_driver.device_count() == 0:
            self._refuse(path, gpu, f"none ({cuda_driver.why_no_device()})", elsewhere)
        here = cuda_driver.capability()
        if here != self.capability:
            found = f"{here / 10:.1f} ({cuda_driver.device_name()})"
            self._refuse(path, gpu, found, elsewhere)
        driver = cuda_driver.driver_version()
        if driver < self.driver:
            needs, found = f"a driver for CUDA {_cuda(self.driver)}", f"one for {_cuda(driver)}"
            self._refuse(path, needs, found, "install a newer driver")
        cuda_driver.make_current()
        needed = self.held + RESERVE
        free, total = cuda_driver.free_memory()
        if needed > free:
            found = f"{free / 1e9:.1f} of {total / 1e9:.1f} GB free"
            needs = f"{needed / 1e9:.1f} GB of device memory"
            self._refuse(path, needs, found, "stop what else uses the GPU")

    def reason(self) -> str | None:
        """Why this machine cannot run the bundle, in the words of `check`; None if it can."""
        try:
            self.check("")
        except WrongMachine as wrong:
            fields = wrong.fields
            return f"needs {fields['needs']}; this machine has {fields['here']}"
        except CudaError as error:
            return str(error)
        return None

    def _refuse(self, path: str, needs: str, here: str, remedy: str) -> None:
        raise WrongMachine(path=path, target=self.target, needs=needs, here=here, remedy=remedy)


def _cuda(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
