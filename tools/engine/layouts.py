"""Layouts from the header against full processing, on images of random sizes, without an engine.

    scripts/layouts                            # every family that takes images, 300 sizes each
    scripts/layouts qwen3-vl internvl --count 30
    scripts/layouts --write                    # and write the column of docs/get-started/models.md

For each family: how many layouts equal that of full processing, and the CPU time of both, of an image of 1024×768.
Fails if a layout differs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from semel.core import Media, Rendering, Target
from semel.errors import RequestError
from semel.lab.testing.models import FAMILIES, build
from tools.engine.models_page import PAGE, replace_column
from tools.engine.sizes import image_of, random_sizes

__all__ = ["SIZES", "Layouts", "compare_layouts", "layouts_of", "load_generic", "takers"]

SIZES: Final = 300
_LARGE: Final = (1024, 768)
_TIMES: Final = 15


@dataclass(frozen=True)
class Layouts:
    """What the headers of a family's images tell."""

    proof: str
    sizes: int = 0
    equal: int = 0
    refused: int = 0
    """Sizes that processing refuses, of which the header has to tell nothing."""

    faults: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the cell of the table."""
        if self.proof.startswith("yes"):
            return f"{self.equal + self.refused} of {self.sizes}"
        return self.proof.partition(", and ")[0]


def takers() -> list[str]:
    """Return the families that take images."""
    return [name for name, model in FAMILIES.items() if "image" in model.serving.max_items]


def load_generic(family: str, folder: Path) -> Any:
    """Load vLLM's processor of a family, as a pool does."""
    from semel.engine.vllm.model.processor import VllmProcessor

    flags = FAMILIES[family].serving.engine_flags
    dtype = "bfloat16" if "bfloat16" in flags else "float32"
    rendering = Rendering(trust_remote_code="--trust-remote-code" in flags)
    return VllmProcessor.load(folder, Target(dtype, rendering=rendering))


def compare_layouts(processor: Any, count: int, seed: int = 0) -> Layouts:
    """Compare the layouts of images of random sizes with those of full processing."""
    proof = processor.header_layouts.proof
    equal = refused = 0
    faults: list[str] = []
    sizes = [*dict.fromkeys(random_sizes(2 * count, seed))][:count]
    for width, height in sizes if proof.fields is not None else ():
        media = Media("image", image_of(width, height), "image/png")
        told = processor.lay_out_header(media)
        try:
            made = processor.process(media).layout
        except RequestError:
            made = None
            refused += told is None
        equal += told is not None and told == made
        if told != made:
            faults.append(f"{width}×{height}: the header tells {told!r}, processing makes {made!r}")
    return Layouts(str(proof), len(sizes), equal, refused, tuple(faults))


def _times(processor: Any) -> tuple[float, float]:
    """Return the CPU time of layouts of new sizes, from the header and in full."""
    media = [Media("image", image_of(_LARGE[0], _LARGE[1] + index), "image/png") for index in range(_TIMES)]
    return _cpu_ms(processor.lay_out_header, media), _cpu_ms(processor.process, media)


def _cpu_ms(work: Callable[[Media], object], media: list[Media]) -> float:
    spent = []
    for one in media:
        began = time.process_time()
        work(one)
        spent.append((time.process_time() - began) * 1e3)
    return statistics.median(spent)


def layouts_of(family: str, folder: Path) -> str:
    """Return the cell of a family's row."""
    return str(compare_layouts(load_generic(family, folder), SIZES)) if family in takers() else ""


def show(family: str, folder: Path, count: int) -> Layouts:
    """Compare one family, and show a row."""
    processor = load_generic(family, build(family, folder / family))
    found = compare_layouts(processor, count)
    header_ms, full_ms = _times(processor)
    times = f"{header_ms:.2f} ms | {full_ms:.1f} ms | {header_ms / full_ms:.3f}×"
    write(f"| {family} | {found.proof} | {found.equal + found.refused} of {found.sizes} | {found.refused} | {times} |")
    for fault in found.faults:
        write(f"    {fault}")
    return found


def write(line: str) -> None:
    """Show a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Compare the families of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", nargs="*", help=f"all by default: {', '.join(takers())}")
    parser.add_argument("--count", type=int, default=SIZES, help="how many sizes")
    parser.add_argument("--write", action="store_true", help="write the column of docs/get-started/models.md")
    options = parser.parse_args()
    if strangers := set(options.family) - set(takers()):
        parser.error(f"{', '.join(sorted(strangers))} take no images")
    import torch

    torch.set_num_threads(1)
    write("| family | told by the header | equal to full processing | refused by both | header | full | |")
    write("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="layouts-") as folder:
        found = {family: show(family, Path(folder), options.count) for family in options.family or takers()}
    if options.write:
        PAGE.write_text(replace_column(PAGE.read_text(), {family: str(one) for family, one in found.items()}))
    sys.exit(any(one.faults for one in found.values()))


if __name__ == "__main__":
    main()
