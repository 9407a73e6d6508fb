"""The sandbox of a process that decodes media (threats S23): what is left to an attacker in it.

Each layer is the kernel's, is entered once and for ever, and costs nothing per item.
"""

from semel.processing.sandbox.sandbox import LAYERS, Sandbox, check_whole, enter_sandbox, kernel_sandbox

__all__ = ["LAYERS", "Sandbox", "check_whole", "enter_sandbox", "kernel_sandbox"]
