"""The program of a pool process: `python -m semel.processing.pool.child FD [MEMORY] [json]`.

It serves one pipe, one order at a time, and ends when the other end closes, however that happened. Media are decoded
here and nowhere else, under a limit of memory and of time (threats S6): what native code does wrong ends this process
and no other. Before it sees a client's byte it enters a sandbox, which it never leaves (S23). The text of a foreign
error stays in this process's log (S7).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import logging
import os
import resource
import select
import signal
import socket
import sys
import warnings
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec

from semel.cache import Window
from semel.core import Assembly, Feature, Media, Probes
from semel.errors import ConfigError, MediaTooLarge, PromptTooLong, ProtocolError, SemelError, ServiceError
from semel.media import Pieces, count_pages, image_size
from semel.media.decode.image import FORMATS
from semel.media.decode.limits import DecodeLimits
from semel.media.decode.warmup_media import SAMPLES
from semel.processing.folder import find_tokenizer
from semel.processing.pool.pipe import (
    HEADER_BYTES,
    MAX_ANSWER_BYTES,
    Assemble,
    Assembled,
    ClipPieces,
    CountPages,
    Cut,
    Description,
    Detokenize,
    Drop,
    Dropped,
    Load,
    Made,
    Offer,
    Order,
    PageCount,
    Ready,
    Tokenize,
    Work,
    decode_order,
    encode,
    encode_pieces,
    read_header,
    to_failure,
    to_made,
    to_payload,
)
from semel.processing.pool.prompts import decode_prompt, payload_of_assembly, to_assembled
from semel.processing.pool.text import text_answer
from semel.processing.probes import run_probes
from semel.processing.processor import COUNT_METHOD, Processor, load_processor
from semel.processing.sandbox import Sandbox, check_whole, enter_sandbox
from semel.processing.tensors import is_out_of_memory
from semel.processing.vocabulary import EngineTokenizer, Vocabulary, to_vocabulary
from semel.telemetry.logs import log_to_stderr

__all__ = ["check_header", "log_as_child", "main", "serve", "tokens_from_header", "warm_up"]

logger = logging.getLogger(__name__)

_IDLE_S: Final = 5.0
_Result = Feature | Pieces | PageCount | Assembly

_Work = Work | CountPages | Cut | Assemble


def main() -> None:
    """Serve the pipe whose descriptor is the first argument; the second, if there is one, is of its staging memory."""
    log_as_child()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the frontend, which still has requests to answer
    descriptors = [int(argument) for argument in sys.argv[1:] if argument.isdecimal()]
    with (
        socket.socket(fileno=descriptors[0]) as pipe,
        contextlib.suppress(EOFError, ConnectionError),  # the pool is gone, and so are we
    ):
        serve(pipe, Window.attach(descriptors[1], writable=True) if len(descriptors) > 1 else None)
    logging.shutdown()
    os._exit(0)  # 1.4 s faster than taking torch down


def log_as_child() -> None:
    """Log with the process's number, as the words of its command line say."""
    text = "%(levelname)s processing[%(process)d] %(name)s: %(message)s"
    log_to_stderr("json" if "json" in sys.argv else "text", level=logging.WARNING, text=text)
    logging.getLogger("semel").setLevel(logging.INFO)


def serve(pipe: socket.socket, memory: Window | None = None) -> None:
    """Load what the first order says, then do the others until the pipe ends."""
    load, _ = _receive(pipe, max_payload_bytes=0)
    if not isinstance(load, Load):
        raise ProtocolError(f"the first order of a pool process was {type(load).__name__}; it has to be Load")
    try:
        processor = _load(load)
        if memory is not None:
            processor.write_into(memory.view(0, memory.size))
        vocabulary = _vocabulary(load, processor)
        sandbox = _enter_sandbox(load)
        # The probes run inside: what they show of the decoders is then true of what clients send.
        description = Description.of(processor, vocabulary, _probes(load, processor))
    except Exception as error:  # noqa: BLE001 the edge of the process
        pipe.sendall(encode(to_failure(_ours(error, load))))
        return
    pipe.sendall(encode(Ready(description, sandbox)))
    while True:
        _give_back_memory_if_idle(pipe)
        work, media = _receive(pipe, max_payload_bytes=load.max_memory_bytes)
        if isinstance(work, Tokenize | Detokenize):
            _answer_text(pipe, processor, load, work, media)
            continue
        if not isinstance(work, _Work):
            raise ProtocolError(f"a pool process that has loaded its processor got {type(work).__name__}")
        if not _answer(pipe, processor, load, work, media, memory):
            logger.warning("memory that items have left behind is over half of the limit; another process takes over")
            return


def _load(load: Load) -> Processor:
    import torch

    torch.set_num_threads(1)
    processor = load_processor(load.processor, Path(load.folder), load.target, load.limits)
    warm_up(processor)
    warnings.simplefilter("ignore")  # they are about clients' files, and each new text would be kept for ever
    _limit_memory(load.max_memory_bytes)
    gc.collect()
    gc.freeze()  # what is loaded by now stays: collecting what an item leaves behind need not walk it
    return processor


def _enter_sandbox(load: Load) -> Sandbox:
    """From here on this process reads its libraries and the model's files, and talks to its pipe."""
    folder = Path(load.folder)
    sandbox = enter_sandbox({folder, find_tokenizer(folder, load.target.rendering)})
    if load.requires_sandbox:
        check_whole(sandbox)
    return sandbox


def _probes(load: Load, processor: Any) -> Probes | None:
    """Run the probes, if this process is the one to. Limits are for clients' media: a worker's processor has none."""
    if isinstance(load.probes, bool):
        return run_probes(replace(processor, limits=DecodeLimits())) if load.probes else None
    return load.probes


def _vocabulary(load: Load, processor: Processor) -> Vocabulary | None:
    folder = find_tokenizer(Path(load.folder), load.target.rendering)
    return to_vocabulary(processor.tokenizer, folder, processor.placeholders.values())


def warm_up(processor: Processor) -> None:
    """Make features of small items: a process's first image costs twice what a later one costs, its first clip thrice.

    A process that takes another's place while others serve gets no other warm-up (requirements E3).
    """
    for modality in processor.modalities:
        if (sample := SAMPLES.get(modality)) is None:
            continue
        try:
            processor.lay_out_header(sample(0))  # proves now that headers tell layouts
            processor.process(sample(0))
        except Exception as error:  # noqa: BLE001 foreign code; the first request will tell its client
            logger.warning("warming up %s failed: %s", modality, str(error) or repr(error))


def _limit_memory(max_bytes: int) -> None:
    """Let this process have so much more than it has now.

    The limit is on data, not on address space: torch reserves of the latter what it never touches, and how much depends
    on its build. So does what loading takes, hence the limit on top of it.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = _data_bytes() + max_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def _give_back_memory_if_idle(pipe: socket.socket) -> None:
    """Buffers of images stay with the process, for the next one; if none comes for a while, they go to the kernel."""
    if not select.select([pipe], [], [], _IDLE_S)[0]:
        with contextlib.suppress(AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)


def _is_used_up(load: Load) -> bool:
    """Return whether what is left of earlier items would soon have innocent ones refused."""
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return limit != resource.RLIM_INFINITY and _data_bytes() > limit - load.max_memory_bytes // 2


def _data_bytes() -> int:
    """Return what the kernel counts against the limit: private writable memory, touched or not."""
    for line in os.pread(_status(), 8_192, 0).decode().splitlines():
        name, _, value = line.partition(":")
        if name == "VmData":
            return int(value.split()[0]) * 1024
    raise ConfigError("/proc/self/status has no VmData; preprocessing limits its memory by it and needs Linux")


@cache
def _status() -> int:
    """Open since before the sandbox, in which nothing of /proc can be opened."""
    return os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)


def _answer(
    pipe: socket.socket, processor: Processor, load: Load, work: _Work, media: bytes, memory: Window | None
) -> bool:
    """Answer an order; whether another may follow."""
    try:
        result = _do(processor, load, work, media)
        made = _described(work.item, result)
        head = encode(made, made.payload_bytes)
    except Exception as error:  # noqa: BLE001 the edge of the process
        failed = to_failure(_ours(error, load))
    else:
        if isinstance(result, Pieces):
            _offer(pipe, Offer(work.item, made.payload_bytes), head, result.files)
        elif isinstance(result, Assembly):
            pipe.sendall(head + payload_of_assembly(result))
        elif isinstance(result, PageCount):
            pipe.sendall(head)
        else:
            assert isinstance(made, Made)
            _send(pipe, made, head, result, memory)
        return True
    last = _is_used_up(load)  # asked only now: the error held on to what the item had taken
    pipe.sendall(encode(msgspec.structs.replace(failed, last=last)))
    return not last


def _described(item: int, result: _Result) -> Made | ClipPieces | PageCount | Assembled:
    if isinstance(result, PageCount):
        return result
    if isinstance(result, Pieces):
        return encode_pieces(item, result)
    return to_assembled(item, result) if isinstance(result, Assembly) else to_made(item, result)


def _answer_text(
    pipe: socket.socket, processor: Processor, load: Load, work: Tokenize | Detokenize, payload: bytes
) -> None:
    signal.setitimer(signal.ITIMER_REAL, 2 * load.timeout_s)  # as in `_do`
    try:
        answer, data = text_answer(EngineTokenizer(processor.tokenizer), work, payload)
        head = encode(answer, len(data))
    except Exception as error:  # noqa: BLE001 the edge of the process
        pipe.sendall(encode(to_failure(_ours(error, load))))
    else:
        pipe.sendall(head)
        pipe.sendall(data)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _send(pipe: socket.socket, made: Made, head: bytes, feature: Feature, memory: Window | None) -> None:
    payload = to_payload(made, feature)
    if memory is not None and 0 < made.tensor_bytes <= memory.size:
        head, payload = encode(_write(made, feature, memory.view(0, made.tensor_bytes))), iter(())
        if len(head) <= MAX_ANSWER_BYTES:
            pipe.sendall(head)
            return
    _offer(pipe, made.offer, head, payload)


def _offer(pipe: socket.socket, offer: Offer, head: bytes, payload: Iterable[bytes | memoryview]) -> None:
    """Send an answer and its payload, if the pool takes what they are."""
    pipe.sendall(encode(offer))
    order, _ = _receive(pipe, max_payload_bytes=0)
    if isinstance(order, Drop):
        pipe.sendall(encode(Dropped()))
        return
    pipe.sendall(head)
    for piece in payload:
        pipe.sendall(piece)


def _write(made: Made, feature: Feature, memory: memoryview) -> Made:
    """Write the tensors into shared memory, but for one that was made there at its place; what to say of that."""
    begin = _address(memory)
    spans: list[tuple[int, int, bytes | memoryview]] = []
    for head, start, end in made.spans():
        data = feature.tensors[head.name].data.cast("B")
        if start == end or (at := _address(data)) == begin + start:
            continue
        is_inside = begin <= at < begin + memory.nbytes  # another tensor may be written over it
        spans.append((start, end, bytes(data) if is_inside else data))
    for start, end, piece in spans:
        memory[start:end] = piece
    return msgspec.structs.replace(made, is_written=True)


def _address(view: memoryview) -> int:
    """Return where a view begins; 0 for one that is not writable, as shared memory is."""
    return 0 if view.readonly else ctypes.addressof(ctypes.c_char.from_buffer(view))


def _do(processor: Processor, load: Load, work: _Work, media: bytes) -> _Result:
    # The pool keeps the deadline. If it has died meanwhile, the signal ends us, in native code as well; nobody would.
    signal.setitimer(signal.ITIMER_REAL, 2 * load.timeout_s)
    try:
        if isinstance(work, Assemble):
            return processor.assemble(*decode_prompt(media))
        if isinstance(work, Cut):
            return processor.cut(Media("audio", media))
        if isinstance(work, CountPages):
            return PageCount(work.item, count_pages(media))
        item = Media(work.modality, media, work.mime, work.page)
        if load.max_tokens is not None and not processor.encoder_decoder:
            check_header(processor, item, work.options, load.max_tokens)
        if work.only_layout:
            return Feature(work.modality, {}, processor.lay_out(item, work.options))
        return processor.process(item, work.options)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if isinstance(work, Cut) or (isinstance(work, Work) and work.modality != "image"):
            gc.collect()  # PyAV's containers and streams refer to each other, and hold frames meanwhile


def _ours(error: Exception, load: Load) -> SemelError:
    """Return the error that the pool gets to see."""
    if isinstance(error, SemelError):
        return error
    if isinstance(error, MemoryError) or is_out_of_memory(error):
        return MediaTooLarge(
            f"the media needs more memory than the limit of {load.max_memory_bytes:,} bytes "
            f"(--max-processing-memory-gb); send a smaller one"
        )
    logger.error("an order failed in a way that we do not expect", exc_info=error)
    return ServiceError("preprocessing failed; the log of its process says why")


def _receive(pipe: socket.socket, *, max_payload_bytes: int) -> tuple[Order, bytes]:
    message_bytes, payload_bytes = read_header(_read(pipe, HEADER_BYTES), max_payload_bytes=max_payload_bytes)
    return decode_order(_read(pipe, message_bytes)), _read(pipe, payload_bytes)


def _read(pipe: socket.socket, size: int) -> bytes:
    if not size:
        return b""
    if len(data := pipe.recv(size, socket.MSG_WAITALL)) < size:
        raise EOFError
    return data


def check_header(processor: Processor, media: Media, options: Mapping[str, object], max_tokens: int) -> None:
    """Refuse an image that alone has more tokens than the model takes, before a pixel is decoded (threats S29).

    Its layout may be known by its size, and HF processors declare how many tokens an image of a size becomes. Where
    neither is, its offer is checked.
    """
    if media.modality != "image":
        return
    layout = processor.lay_out_header(media, options)
    tokens = tokens_from_header(processor.hf_processor, media, options) if layout is None else len(layout)
    if tokens is not None and tokens >= max_tokens:
        raise PromptTooLong(
            f"{media.subject} alone has {tokens:,} tokens; the model takes {max_tokens:,} with the answer: "
            f"{'send a smaller one' if media.page is None else 'lower its dpi'}, or lower min_pixels in "
            "mm_processor_kwargs"
        )


def tokens_from_header(processor: Any, media: Media, options: Mapping[str, object]) -> int | None:
    """Return the tokens of an image, as it lies or turned; None if they cannot be known without its pixels."""
    if (count := getattr(processor, COUNT_METHOD, None)) is None:
        return None
    arguments = processor.valid_processor_kwargs
    defaults = deepcopy(arguments._defaults)
    try:
        width, height = _size_of(media)
        sizes = [(height, width), (width, height)]  # an EXIF orientation may turn it
        return min(map(int, count(image_sizes=sizes, **options)["num_image_tokens"]))
    except Exception:  # noqa: BLE001 - foreign code, given a client's file and options: processing tells what is wrong
        return None
    finally:
        arguments._defaults = defaults  # most processors write the options into those of every later call


def _size_of(media: Media) -> tuple[int, int]:
    from PIL import Image

    if media.page is not None:
        return image_size(media, DecodeLimits()) or (0, 0)
    with Image.open(io.BytesIO(media.data), formats=FORMATS) as image:
        return image.size


if __name__ == "__main__":
    main()
