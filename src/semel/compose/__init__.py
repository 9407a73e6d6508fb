"""The assembly of the parts: a pipeline for libraries, and the processes of a worker and of a frontend.

The only place that knows all the parts. What is decided here is who is given what, and in which order things end.
"""

from semel.compose.frontend import create_cache, run_frontend
from semel.compose.pipeline import compose_pipeline
from semel.compose.worker import run_worker

__all__ = [
    "compose_pipeline",
    "create_cache",
    "run_frontend",
    "run_worker",
]
