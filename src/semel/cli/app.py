"""The commands and what they take."""

from __future__ import annotations

from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

__all__ = ["app"]

app = typer.Typer(
    name="semel",
    help="The multimodal data plane for LLM serving: every image is fetched, preprocessed, shipped and encoded once.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
testing = typer.Typer(help="What one needs to try semel without downloading anything.", no_args_is_help=True)
app.add_typer(testing, name="testing")

console = Console()


@app.command()
def version() -> None:
    """Print the version."""
    console.print(f"semel {installed_version('semel')}", highlight=False)


@app.command()
def key(path: Annotated[Path, typer.Argument(help="The file to make; it must not exist.")]) -> None:
    """Make a fleet key: 32 secret bytes that every process of one fleet shares and that key every digest."""
    from semel.settings import create_key

    made = create_key(path)
    console.print(f"{path}: fleet key {made.id}. Give it to every frontend and worker as --key-file.", highlight=False)


@testing.command()
def model(
    family: Annotated[str, typer.Argument(help="Which family: qwen2-vl, qwen2-audio or whisper.")],
    directory: Annotated[Path, typer.Argument(help="Where to write the model folder.")],
) -> None:
    """Write a tiny real model with random weights: real code paths, exact answers, no meaning in the text."""
    from semel.testing.models import build

    with console.status(f"building {family}"):
        build(family, directory)
    console.print(f"{directory}: a tiny {family}", highlight=False)
