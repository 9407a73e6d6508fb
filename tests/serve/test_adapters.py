"""LoRA adapters of `semel serve`, next to bare vLLM's server with the same flags."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.conftest import Folder
from tests.engine.adapter_files import build_adapter
from tests.engine.parity import draw_image, image_part
from tests.serve.both import serving_both

pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(900)]


def test_adapters_are_listed_asked_for_loaded_and_refused_as_with_vllms_server(tiny: Folder, tmp_path: Path) -> None:
    model = tiny("qwen2-vl")
    red, blue = (build_adapter(model, tmp_path / name, seed) for seed, name in enumerate(("red", "blue")))
    modules = [f"red={red}", json.dumps({"name": "blue", "path": str(blue), "base_model_name": "tiny"})]
    flags = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--lora-modules", *modules)
    rng = np.random.default_rng(4)
    with serving_both(model, tmp_path, *flags) as both:
        mine, theirs = (
            [(one.id, getattr(one, "parent", None)) for one in client.models.list()]
            for client in (both.ours, both.bare)
        )
        assert mine == theirs
        told: dict[str, list[str | None]] = {"tiny": [], "red": [], "blue": []}
        for _ in range(3):
            content: Any = [image_part(draw_image(rng)), {"type": "text", "text": "what is this?"}]
            for name, texts in told.items():
                answer = both.chat(model=name, messages=[{"role": "user", "content": content}], cached=False)
                texts.append(answer.choices[0].message.content)
                assert answer.model == name
        assert told["tiny"] != told["red"] != told["blue"] != told["tiny"], "the adapters change nothing"
        both.refuse(model="green")
        key = {"Authorization": f"Bearer {both.admin_key.read_text().strip()}"}
        body = {"lora_name": "green", "lora_path": str(red)}
        done = httpx.post(f"{both.admin_url}/v1/load_lora_adapter", json=body, headers=key, timeout=60)
        assert done.status_code == 200, done.text
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 6, "temperature": 0}
        green = both.ours.chat.completions.create(model="green", **asked).choices[0].message.content
        assert green == both.bare.chat.completions.create(model="red", **asked).choices[0].message.content
        done = httpx.post(f"{both.admin_url}/v1/unload_lora_adapter", json=body, headers=key, timeout=60)
        assert done.status_code == 200, done.text
        both.refuse(model="green")
