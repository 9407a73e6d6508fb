"""What of two contracts has to be the same, and what a refusal says (issue 20.3)."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from semel.core import PROBE_BYTES, AnswerSettings, Contract, Probes
from semel.fleet.compatibility import Difference, first_difference, processing_difference
from semel.processing.probes import catalogue_id, probe_names, proven_fingerprint
from tests.wire.examples import CONTRACT

VERSIONS = {"av": "18.1.0", "numpy": "2.3.5", "pillow": "13.0.0", "torch": "2.13.0", "transformers": "5.19.0"}
PATCHED = VERSIONS | {"pillow": "13.0.1"}
SAME = Probes(catalogue_id(), bytes(PROBE_BYTES * len(probe_names())), VERSIONS)


def with_probes(probes: Probes, contract: Contract = CONTRACT) -> Contract:
    return replace(contract, fingerprint=proven_fingerprint("f" * 16, probes), probes=probes)


def flipped(name: str, versions: dict[str, str]) -> Probes:
    """One bit of one probe's result is different."""
    results = bytearray(SAME.results)
    results[PROBE_BYTES * probe_names().index(name)] ^= 1
    return Probes(SAME.catalogue, bytes(results), versions)


def difference(worker: Contract, fleet: Contract | None = None) -> Difference:
    found = first_difference(fleet or with_probes(SAME), worker)
    assert found is not None
    return found


def test_workers_with_other_patches_and_equal_results_serve_together() -> None:
    """Control: versions that count, as they did when a patch of Pillow meant to replace the fleet."""
    patched = replace(SAME, versions=PATCHED)
    assert first_difference(with_probes(SAME), with_probes(patched)) is None
    assert SAME.versions != patched.versions


@pytest.mark.parametrize(
    ("name", "versions", "text"),
    [
        (
            "jpeg CMYK baseline quality 75 4:2:0",
            PATCHED,
            "Pillow 13.0.0 in the fleet, 13.0.1 there decode 'jpeg CMYK baseline quality 75 4:2:0' differently: ",
        ),
        (
            "audio mp4 aac 48000 Hz stereo",
            VERSIONS | {"av": "18.1.1"},
            "PyAV 18.1.0 in the fleet, 18.1.1 there decode 'audio mp4 aac 48000 Hz stereo' differently",
        ),
        (
            "feature of an image of 640x480",
            VERSIONS | {"torch": "2.13.1"},
            "torch 2.13.0 in the fleet, 2.13.1 there make 'feature of an image of 640x480' differently",
        ),
        (
            "webp RGB quality 80",
            VERSIONS,
            "Pillow 13.0.0 in the fleet and there decode 'webp RGB quality 80' differently: another build, or",
        ),
    ],
)
def test_a_result_that_differs_is_told_by_the_probe_s_name(name: str, versions: dict[str, str], text: str) -> None:
    """Control: minor versions alone find no difference."""
    found = difference(with_probes(flipped(name, versions)))
    assert found.reason == "probes"
    assert str(found).startswith(text)
    assert [version.rsplit(".", 1)[0] for version in versions.values()] == [
        version.rsplit(".", 1)[0] for version in VERSIONS.values()
    ]


def test_another_minor_version_is_refused_also_if_all_results_are_equal() -> None:
    other = with_probes(replace(SAME, versions=VERSIONS | {"pillow": "13.1.0"}))
    found = difference(replace(other, fingerprint="e" * 16))
    assert (found.reason, str(found)) == (
        "versions",
        "Pillow 13.0.0 in the fleet, 13.1.0 there: install the same major and minor version",
    )


def test_a_frontend_says_here_for_itself_and_names_the_folder_where_probes_tell_nothing() -> None:
    ours, its = ("a" * 16, SAME), ("b" * 16, flipped("gif grey", PATCHED))
    assert str(processing_difference(ours, its)).startswith("Pillow 13.0.0 here, 13.0.1 there decode 'gif grey'")
    for probes in (SAME, None, Probes("another", b"", VERSIONS)):
        found = processing_difference(ours, ("b" * 16, probes))
        assert (found.reason, "the same model folder" in str(found)) == ("fingerprint", True)


OTHERS = {
    "weights": ("0" * 32, "weights", "--revision"),
    "tool_call_parser": ("hermes", "parsers", "--tool-call-parser"),
    "enable_auto_tool_choice": (True, "parsers", "--enable-auto-tool-choice"),
    "tool_strict_level": ("none", "parsers", "--tool-strict-level"),
    "reasoning_parser": ("qwen3", "parsers", "--reasoning-parser"),
    "parser_plugins": ({"mine.py": "00"}, "parsers", "--tool-parser-plugin"),
    "generation_config": ({"temperature": 0.7}, "generation_config", "--override-generation-config"),
    "chat_template": ("0" * 32, "chat_template", "chat template"),
}


@pytest.mark.parametrize("name", [field.name for field in fields(AnswerSettings)])
def test_every_setting_that_changes_answers_is_compared_and_its_flag_is_named(name: str) -> None:
    """Control: the fingerprint, which covers none of them."""
    value, reason, flag = OTHERS[name]
    answers = AnswerSettings(**{name: value})  # type: ignore[arg-type]
    ours, its = with_probes(SAME), with_probes(SAME, replace(CONTRACT, answers=answers))
    found = difference(its, ours)
    assert found.reason == reason
    assert flag in str(found)
    assert its.fingerprint == ours.fingerprint
