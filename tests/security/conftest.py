"""The application of the frontend's tests."""

from __future__ import annotations

from tests.frontend.conftest import app, drawing, folder, parts_renderer

__all__ = ["app", "drawing", "folder", "parts_renderer"]
