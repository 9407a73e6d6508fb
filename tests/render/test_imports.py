from __future__ import annotations

import subprocess
import sys


def test_rendering_imports_neither_torch_nor_numpy_nor_transformers_nor_vllm() -> None:
    program = (
        "import sys, semel.render; "
        "print(*{'torch', 'numpy', 'transformers', 'vllm'} & {name.partition('.')[0] for name in sys.modules})"
    )
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert child.stdout.strip() == ""
