"""Lazy images in vLLM's own renderer: what its engine gets is the same, and known images are not decoded."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import re
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from semel.vllm_plugin.counters import COUNTS
from semel.vllm_plugin.levels import LevelOff
from semel.vllm_plugin.media_memory import DecodedMedia, SharedMap
from tests.engine.parity import data_url, image_part
from tests.engine.rendering import rendering_of, same_items
from tests.security.corpus import encode_clip, encode_image, encode_video, specimens

pytestmark = pytest.mark.engine

RGB = Image.fromarray(np.random.default_rng(0).integers(0, 256, (44, 60, 3), dtype=np.uint8))


def kinds() -> dict[str, bytes]:
    """Files of every kind that a client sends: those that semel takes, and what Pillow reads besides."""
    some = {specimen.name: specimen.media.data for specimen in specimens() if specimen.media.modality == "image"}
    return some | {
        "jpeg with broken exif": encode_image(RGB, "JPEG", exif=b"Exif\x00\x00no EXIF"),
        "png of grey and alpha": encode_image(RGB.convert("LA")),
        "png of one bit": encode_image(RGB.convert("1")),
        "avif": encode_image(RGB, "AVIF"),
    }


KINDS = kinds()
DAMAGED = {
    "jpeg cut off": KINDS["jpeg"][:400],
    "png cut off": KINDS["png"][:-300],
    "text": b"no image",
    "empty": b"",
    "20,000 by 20,000": KINDS["bmp"][:18] + struct.pack("<ii", 20_000, 20_000) + KINDS["bmp"][26:],
}


class Renderer:
    """vLLM's renderer of a tiny model with its processor cache, and one connector."""

    def __init__(self, folder: Path, connector: str, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.renderers import renderer_from_config

        arguments = EngineArgs(model=str(folder), dtype="float32", limit_mm_per_prompt={"image": 20, "video": 2})
        self._renderer = renderer_from_config(arguments.create_engine_config())
        self._connector = connector
        self._monkeypatch = monkeypatch

    def render(self, *files: bytes, **options: Any) -> Any:
        """The engine's input for a chat about some images."""
        from vllm.renderers.params import ChatParams

        self._monkeypatch.setenv("VLLM_MEDIA_CONNECTOR", self._connector)
        chat = [{"role": "user", "content": [*map(image_part, files), {"type": "text", "text": "What is this?"}]}]
        params = ChatParams(chat_template_kwargs={"add_generation_prompt": True}, **options)
        _, (prompt,) = self._renderer.render_chat([chat], params)
        return prompt

    def evict(self) -> None:
        self._renderer.clear_mm_cache()


@pytest.fixture(scope="module")
def renderers(tiny: Callable[[str], Path]) -> Iterator[tuple[Renderer, Renderer]]:
    """vLLM's own way, and the level."""
    from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY

    from semel.vllm_plugin.images import Connector

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setitem(MEDIA_CONNECTOR_REGISTRY.name2class, "semel", Connector)
        folder = tiny("qwen2-vl")
        yield Renderer(folder, "http", monkeypatch), Renderer(folder, "semel", monkeypatch)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known yet."""
    from semel.vllm_plugin import images

    monkeypatch.setattr(images._State, "known", SharedMap(100))
    monkeypatch.setattr(images._State, "decoded", DecodedMedia(1 << 24))
    monkeypatch.setattr(images._State, "unopened", False)
    COUNTS.clear()


def differences(stock: Any, ours: Any) -> list[str]:
    """Which parts of two prompts differ. An item that the cache has stands in it as None."""
    found = [
        part
        for part in ("prompt_token_ids", "mm_hashes", "mm_placeholders")
        if str(stock[part]) != str(ours[part]) or not stock[part]
    ]
    gone = [[item is None for item in prompt["mm_kwargs"]["image"]] for prompt in (stock, ours)]
    if gone[0] != gone[1]:
        return [*found, "cache"]
    if not all(gone[0]):
        try:
            same_items(rendering_of(ours), rendering_of(stock))
        except AssertionError:
            found.append("tensors")
    return found


def three_times(renderers: tuple[Renderer, Renderer], data: bytes, **options: Any) -> list[list[str]]:
    """The differences of an image that is new, one that the cache has, and one that was evicted."""
    found = []
    for step in ("new", "hit", "evicted"):
        if step != "hit":
            for renderer in renderers:
                renderer.evict()
        stock, ours = (renderer.render(data, **options) for renderer in renderers)
        assert (stock["mm_kwargs"]["image"][0] is None) == (step == "hit")
        found.append(differences(stock, ours))
    return found


def test_there_are_20_kinds() -> None:
    assert len(KINDS) >= 20


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_is_the_same_to_the_engine_new_cached_and_evicted(
    kind: str, renderers: tuple[Renderer, Renderer]
) -> None:
    assert three_times(renderers, KINDS[kind]) == [[], [], []]
    assert COUNTS["decodes"] == 2
    assert COUNTS["decodes_saved"] == 1


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("png rgba", {"image_mode": None}),
        ("png rgba", {"rgba_background_color": [200, 0, 0]}),
        ("png palette", {"rgba_background_color": [200, 0, 0]}),
        ("jpeg grey", {"rgba_background_color": [0, 0, 0]}),
    ],
)
def test_an_image_is_the_same_with_other_settings_of_the_loader(
    kind: str, settings: Mapping[str, Any], renderers: tuple[Renderer, Renderer]
) -> None:
    renderers[1].render(KINDS[kind])  # known with the usual settings already
    assert three_times(renderers, KINDS[kind], media_io_kwargs={"image": dict(settings)}) == [[], [], []]


def test_mutant_a_loader_that_knows_no_orientation_is_found(
    renderers: tuple[Renderer, Renderer], monkeypatch: pytest.MonkeyPatch
) -> None:
    from semel.vllm_plugin.images import LazyImageIO

    turn = Image.Transpose.ROTATE_90
    monkeypatch.setattr(
        LazyImageIO, "_decode", lambda self, data: ImageOps.exif_transpose(self._load(data).media.transpose(turn))
    )
    new, hit, evicted = three_times(renderers, KINDS["jpeg"])
    assert (new, hit) == ([], [])
    assert "tensors" in evicted


def test_mutant_a_loader_that_remembers_by_the_bytes_alone_is_found(
    renderers: tuple[Renderer, Renderer], monkeypatch: pytest.MonkeyPatch
) -> None:
    from semel.vllm_plugin import images

    monkeypatch.setattr(images, "repr", lambda _: "", raising=False)
    images.LazyImageIO("RGBA").load_bytes(KINDS["png rgba"])
    assert all("mm_hashes" in found for found in three_times(renderers, KINDS["png rgba"]))


@pytest.mark.parametrize("kind", DAMAGED)
@pytest.mark.parametrize("unopened", [False, True])
def test_a_damaged_file_is_refused_in_the_words_of_vllm_and_nothing_is_known_of_it(
    kind: str, unopened: bool, renderers: tuple[Renderer, Renderer]
) -> None:
    from semel.vllm_plugin import images

    images.leave_unopened(unopened)
    errors = []
    for renderer in (*renderers, renderers[1]):
        with pytest.raises(Exception) as caught:
            renderer.render(DAMAGED[kind])
        errors.append((type(caught.value), re.sub(r"0x[0-9a-f]+", "an address", str(caught.value))))
    stock, *ours = errors
    assert ours == [stock, stock]
    assert images._State.known.weight == 0


def test_ten_turns_with_a_new_image_each_decode_10_images_and_not_55(
    renderers: tuple[Renderer, Renderer], monkeypatch: pytest.MonkeyPatch
) -> None:
    decodes = 0
    decoder = Image._getdecoder

    def counted(*arguments: Any) -> Any:
        nonlocal decodes
        decodes += 1
        return decoder(*arguments)

    monkeypatch.setattr(Image, "_getdecoder", counted)
    turns = [encode_image(RGB.rotate(angle), "JPEG") for angle in range(10)]
    counts = []
    for renderer in renderers:
        renderer.evict()
        decodes = 0
        for length in range(1, 11):
            renderer.render(*turns[:length])
        counts.append(decodes)
    assert counts == [55, 10]
    assert COUNTS == {"decodes": 10, "decodes_saved": 45}


OPERATIONS: Mapping[str, Callable[[Image.Image], Any]] = {
    "copy": lambda image: image.copy(),
    "copy.copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda image: pickle.loads(pickle.dumps(image)),
    "convert": lambda image: image.convert("L"),
    "crop": lambda image: image.crop((1, 2, 20, 30)),
    "transpose": lambda image: image.transpose(Image.Transpose.ROTATE_90),
    "resize": lambda image: image.resize((8, 8)),
    "split": lambda image: image.split(),
    "exif_transpose": ImageOps.exif_transpose,
    "array": lambda image: np.asarray(image).tolist(),
    "palette": lambda image: image.getpalette(),
    "pixel": lambda image: image.getpixel((3, 4)),
    "info": lambda image: image.info,
    "itself": lambda image: image,
}


def outcome(operation: str, image: Image.Image) -> Any:
    try:
        return OPERATIONS[operation](image)
    except Exception as error:  # noqa: BLE001 (whatever Pillow raises)
        return repr(error)


@pytest.mark.parametrize("kind", ["jpeg", "png rgba", "png palette", "jpeg with broken exif"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_is_done_with_an_undecoded_image_comes_out_as_with_a_decoded_one(kind: str, operation: str) -> None:
    from vllm.multimodal.media import ImageMediaIO

    from semel.vllm_plugin.images import LazyImage, LazyImageIO

    plain = ImageMediaIO(None).load_bytes(KINDS[kind]).media
    LazyImageIO(None).load_bytes(KINDS[kind])
    lazy = LazyImageIO(None).load_bytes(KINDS[kind]).media
    assert type(lazy) is LazyImage
    assert (lazy.size, lazy.width, lazy.mode) == (plain.size, plain.width, plain.mode)
    assert not hasattr(lazy, "shape")
    assert type(lazy) is LazyImage  # nothing so far needed its pixels
    assert outcome(operation, lazy) == outcome(operation, plain)
    assert type(lazy) is type(plain)
    assert lazy == plain


def test_an_undecoded_image_is_equal_to_its_decoded_form_from_either_side() -> None:
    from semel.vllm_plugin.images import LazyImageIO

    first, second, third = (LazyImageIO().load_bytes(KINDS["bmp"]).media for _ in range(3))
    assert second == first
    assert first == third


def test_threads_that_need_the_pixels_of_one_image_decode_it_once() -> None:
    from semel.vllm_plugin.images import KnownImage, LazyImage

    begun, decodes = threading.Event(), []

    def decode() -> Image.Image:
        begun.wait(10)
        decodes.append(1)
        return RGB.copy()

    lazy = LazyImage(decode, KnownImage(RGB.size, RGB.mode, False))
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(lazy.tobytes())) for _ in range(4)]
    for thread in threads:
        thread.start()
    begun.set()
    for thread in threads:
        thread.join(10)
    assert found == [RGB.tobytes()] * 4
    assert len(decodes) == 1


def test_an_unopened_image_has_no_size_until_somebody_asks_and_carries_its_settings() -> None:
    from semel.vllm_plugin import images

    images.leave_unopened()
    made = images.LazyImageIO().load_bytes(KINDS["png rgba"])
    assert COUNTS["decodes"] == 0
    assert made.original_bytes == KINDS["png rgba"]
    assert made.io_config == {"image_mode": "RGB", "rgba_background_color": (255, 255, 255)}
    assert made.media.size == (60, 44)
    assert COUNTS["decodes"] == 1


def test_what_is_known_of_images_is_bounded() -> None:
    from semel.vllm_plugin import images

    files = [encode_image(Image.new("L", (8 + number, 8))) for number in range(101)]
    for data in (*files, *files[:2]):  # the first was evicted by the last, and evicts the second
        images.LazyImageIO().load_bytes(data)
    assert COUNTS["decodes"] == 103
    assert images._State.known.weight == 100


def video(shade: int = 0) -> bytes:
    frames = np.full((6, 64, 64, 3), shade, np.uint8)
    frames[:, :32] = 255
    return encode_video(frames)


def clip() -> bytes:
    return encode_clip(np.sin(np.arange(4_000) / 9)[None], "wav", "pcm_s16le")


def load(kind: str, data: bytes, connector: str = "semel", **settings: Any) -> Any:
    from vllm.multimodal.media import MediaConnector

    from semel.vllm_plugin.images import Connector

    made = (Connector if connector == "semel" else MediaConnector)(media_io_kwargs={kind: settings})
    return getattr(made, f"fetch_{kind}")(data_url(data, f"{kind}/x"))


@pytest.mark.parametrize(("kind", "data"), [("video", video()), ("audio", clip())])
def test_a_video_or_clip_is_decoded_once_and_everybody_has_a_copy(kind: str, data: bytes) -> None:
    stock, first, second = (load(kind, data, name) for name in ("http", "semel", "semel"))
    assert COUNTS["decodes"] == 1
    for one in (first, second):
        assert type(one) is type(stock)
        assert np.array_equal(one[0], stock[0])
        assert one[0].dtype == stock[0].dtype
        assert one[1] == stock[1]
    for one in (first, second):  # as a processor might
        one[0][:] = 7
        if kind == "video":
            one[1]["fps"] = 99
    third = load(kind, data)
    assert COUNTS["decodes"] == 1
    assert np.array_equal(third[0], stock[0])
    assert third[1] == stock[1]


def test_a_video_is_decoded_again_with_other_settings_or_other_bytes() -> None:
    loads: list[tuple[bytes, dict[str, Any]]]
    loads = [(video(), {}), (video(), {"num_frames": 2}), (video(90), {}), (video(), {"fps": 1}), (video(), {})]
    found = [load("video", data, **settings) for data, settings in loads]
    assert COUNTS["decodes"] == 4
    for (data, settings), ours in zip(loads, found, strict=True):
        assert np.array_equal(ours[0], load("video", data, "http", **settings)[0])


def test_a_clip_is_known_to_be_a_clip_and_not_a_video_of_the_same_bytes() -> None:
    data = video()
    load("video", data)
    with pytest.raises(ValueError, match="audio"):
        load("audio", data)


def test_decoded_media_are_bounded_in_bytes_and_what_is_larger_is_not_kept() -> None:
    memory, decodes = DecodedMedia(1_000), itertools.count()

    def decode(size: int) -> tuple[Any, Any]:
        next(decodes)
        return np.zeros(size, np.uint8), size

    for size in (600, 300, 600, 2_000, 2_000, 600, 300):
        assert memory.load(size, partial(decode, size))[1] == size
        assert memory.nbytes <= 1_000
    assert next(decodes) == 4
    memory.load("other", partial(decode, 500))  # evicts the 600
    memory.load(600, partial(decode, 600))
    assert next(decodes) == 7


def test_the_level_takes_the_place_of_the_default_connector_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector

    from semel.vllm_plugin.images import Connector, install

    table = dict(MEDIA_CONNECTOR_REGISTRY.name2class) | {"http": MediaConnector}
    monkeypatch.setattr(MEDIA_CONNECTOR_REGISTRY, "name2class", table)
    monkeypatch.setenv("VLLM_MEDIA_CONNECTOR", "theirs")
    with pytest.raises(LevelOff, match="VLLM_MEDIA_CONNECTOR is theirs"):
        install()
    monkeypatch.delenv("VLLM_MEDIA_CONNECTOR")
    table["http"] = type("Theirs", (MediaConnector,), {})
    with pytest.raises(LevelOff, match="Theirs loads the media"):
        install()
    table["http"] = MediaConnector
    monkeypatch.setenv("SEMEL_MEDIA_MEMORY_MB", "much")
    with pytest.raises(LevelOff, match="SEMEL_MEDIA_MEMORY_MB=much is not a number"):
        install()
    monkeypatch.delenv("SEMEL_MEDIA_MEMORY_MB")
    monkeypatch.setenv("SEMEL_ALLOWED_MEDIA_NETWORKS", "10.1")
    with pytest.raises(LevelOff, match="write a network such as"):
        install()
    monkeypatch.delenv("SEMEL_ALLOWED_MEDIA_NETWORKS")
    assert table["http"] is MediaConnector
    for _ in range(2):
        assert install().startswith("images are decoded when needed")
        assert table["http"] is table["semel"] is Connector


class Site(BaseHTTPRequestHandler):
    """An image, a redirect to it by another name, and one by the same name."""

    def do_GET(self) -> None:
        away = {"/away": f"http://127.0.0.1:{self.headers['Host'].rpartition(':')[2]}/image", "/here": "/image"}.get(
            self.path
        )
        self.send_response(302 if away else 200)
        if away:
            self.send_header("Location", away)
        body = b"" if away else KINDS["bmp"]
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


@pytest.fixture
def fetch(port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Fetches an image of `localhost` over a connector."""
    from semel.vllm_plugin import media_fetch
    from semel.vllm_plugin.images import Connector

    checked = media_fetch.CheckedConnection
    made: list[Any] = []

    def image(path: str, *domains: str, networks: str = "127.0.0.0/8, ::1/128") -> Any:
        media_fetch.connection_for.cache_clear()
        monkeypatch.setenv("SEMEL_ALLOWED_MEDIA_NETWORKS", networks)
        made.append(Connector(allowed_media_domains=[*domains]))
        return made[-1].fetch_image(f"http://localhost:{port}{path}").media

    yield image
    for connector in made:
        if isinstance(connector.connection, checked):
            connector.connection.close()
    media_fetch.connection_for.cache_clear()


@pytest.mark.parametrize("path", ["/image", "/here"])
def test_media_of_a_named_domain_are_fetched_also_over_a_redirect_to_itself(path: str, fetch: Any) -> None:
    assert fetch(path, "localhost").size == (60, 44)


def test_a_private_address_and_a_redirect_to_another_host_are_refused_with_422(fetch: Any) -> None:
    from vllm.exceptions import VLLMUnprocessableEntityError

    with pytest.raises(VLLMUnprocessableEntityError, match="not to a public address or one in SEMEL_ALLOWED_MEDIA_NET"):
        fetch("/image", "localhost", networks="")
    with pytest.raises(VLLMUnprocessableEntityError, match="what the URL redirects to is not fetched"):
        fetch("/away", "localhost")
    with pytest.raises(ValueError, match="must be from one of the allowed domains"):
        fetch("/image", "example.com")


def test_without_named_domains_vllm_fetches_by_itself(fetch: Any) -> None:
    """The control: the same private address, and the same redirect."""
    assert fetch("/image").size == fetch("/away").size == (60, 44)


def test_a_fetch_is_bounded_in_bytes(fetch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.exceptions import VLLMUnprocessableEntityError

    from semel.vllm_plugin import images

    monkeypatch.setattr(images.LazyImageIO, "get_max_bytes", lambda _: 1_000)
    with pytest.raises(VLLMUnprocessableEntityError, match="it has over 1,000 bytes"):
        fetch("/image", "localhost")


@pytest.mark.parametrize("other", ["*.example.com", "::1"])
def test_a_domain_that_is_none_leaves_the_policy_for_the_others(other: str, fetch: Any) -> None:
    from vllm.exceptions import VLLMUnprocessableEntityError

    assert fetch("/image", other, "localhost").size == (60, 44)
    with pytest.raises(VLLMUnprocessableEntityError, match="not to a public address"):
        fetch("/image", "localhost", other, networks="")


def test_without_a_domain_that_is_one_no_url_is_fetched(port: int, fetch: Any) -> None:
    from vllm.exceptions import VLLMUnprocessableEntityError

    from semel.vllm_plugin.media_fetch import connection_for

    with pytest.raises(ValueError, match="must be from one of the allowed domains"):
        fetch("/image", "*.example.com")
    with pytest.raises(VLLMUnprocessableEntityError, match="is not fetched"):
        connection_for(("*.example.com",), None).get_bytes(f"http://localhost:{port}/image")


@pytest.mark.parametrize("kind", ["IMAGE", "AUDIO", "VIDEO"])
def test_a_fetch_may_take_as_long_as_vllm_lets_its_modality(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from semel.vllm_plugin.media_fetch import fetch_options

    assert fetch_options().limits.total_s == 30
    monkeypatch.setenv(f"VLLM_{kind}_FETCH_TIMEOUT", "90")
    assert fetch_options().limits.total_s == 90


@pytest.mark.parametrize("megabytes", ["0", "-1"])
def test_without_vllms_limit_of_bytes_there_is_none(megabytes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.connections import _get_media_download_limit_bytes

    from semel.vllm_plugin.media_fetch import fetch_options

    assert fetch_options().limits.max_bytes == _get_media_download_limit_bytes() == 256 << 20
    monkeypatch.setenv("VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB", megabytes)
    assert _get_media_download_limit_bytes() is None
    assert fetch_options().limits.max_bytes == sys.maxsize


def test_a_policy_that_cannot_be_made_leaves_the_fetch_to_vllm(fetch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from semel.vllm_plugin import media_fetch

    monkeypatch.setattr(media_fetch, "CheckedConnection", None)
    assert fetch("/image", "localhost", networks="").size == (60, 44)


async def test_media_are_fetched_and_loaded_on_an_event_loop_too(port: int, fetch: Any) -> None:
    from semel.vllm_plugin.images import Connector

    fetch("/image", "localhost")
    found = await Connector(allowed_media_domains=["localhost"]).fetch_image_async(f"http://localhost:{port}/image")
    assert found.media.size == (60, 44)
    assert COUNTS["decodes"] == 1
    stream = io.BytesIO(found.original_bytes)
    assert found.media == Image.open(stream).convert("RGB")
