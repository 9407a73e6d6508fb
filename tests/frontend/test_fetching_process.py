"""A real frontend process that fetches, allowed by the flags that a user gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pybase64 import b64encode

from semel.core import Target
from semel.media.decode.warmup_media import sample_image
from tests.frontend.test_start import started
from tests.frontend.test_urls import RENDER, body
from tests.media.origin import origin
from tests.serve.served import sum_of

Folder = Callable[[str], Path]


@pytest.mark.slow
async def test_a_frontend_process_fetches_what_its_flags_allow_and_nothing_else_S1(
    tiny: Folder, tmp_path: Path
) -> None:
    image = sample_image(1).data
    (tmp_path / "media").mkdir()
    (tmp_path / "media" / "a.png").write_bytes(image)
    async with origin() as server:
        server["/a.png"] = image
        flags = ["--allow-media-http", f"--allowed-media-domains=127.0.0.1:{server.port}"]
        flags += ["--allowed-media-networks=127.0.0.1/32", f"--allowed-local-media-path={tmp_path}/media"]
        target = Target("float32", "engine")
        async with started(tiny("qwen2-vl"), tmp_path, target, "--preprocessing-processes=1", *flags) as frontend:
            data_url = f"data:image/png;base64,{b64encode(image).decode()}"
            hashes = []
            for url in (server.url("/a.png"), f"file://{tmp_path}/media/a.png", data_url):
                answer = await frontend.client.post(RENDER, json=body(url))
                assert answer.status_code == 200, answer.text
                hashes += answer.json()["features"]["mm_hashes"]["image"]
            assert len(set(hashes)) == 1
            refused = await frontend.client.post(RENDER, json=body(f"http://localhost:{server.port}/a.png?key=secret"))
            assert refused.json()["error"]["code"] == "media_url_not_allowed"
            metrics = await frontend.metrics()
            assert sum_of(metrics, "semel_media_fetched_bytes_total") == 2 * len(image)
            assert sum_of(metrics, "semel_media_fetches_total") == 3
        assert "secret" not in frontend.log.read_text()
        assert server.targets == ["/a.png"]
