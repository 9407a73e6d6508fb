"""Test environment only: lets torchvision's CUDA wheel import on a CPU build of torch.

There is no CPU build of torchvision to install. The 0.28 wheel imports on CPU torch as soon as the two operators whose
kernels live in its CUDA library have a schema. `scripts/install` copies this file into the environment's site-packages
with a `.pth` line, so that every Python process of the environment, vLLM's children included, defines them just
before torchvision is first imported. Nothing under `src/` knows of it.
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_KEEP: list[object] = []  # an operator library lives as long as its Library object


class _DefineSchemas:
    """Answers no import; it only sees that torchvision's is about to happen."""

    def find_spec(self, name: str, path: object, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            library = torch.library.Library("torchvision", "FRAGMENT")
            for schema in _SCHEMAS:
                library.define(schema)
            _KEEP.append(library)
        return None


sys.meta_path.insert(0, _DefineSchemas())  # type: ignore[arg-type]
