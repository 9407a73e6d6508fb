"""Every class of threat that semel knows is tied to tests that exist, and to wrong code on which they fail.

For most rows a mutant is put in here, and a test of the row, called as it is, has to fail on it. For the others a test
of the row's own file does that, or keeps the naive way beside ours; its id stands here.
"""

from __future__ import annotations

import ast
import inspect
import io
import pickle
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from PIL import Image

from semel.core import Contract
from semel.errors import ConfigError, InvalidRequest
from semel.media.decode import audio, image
from semel.media.decode.limits import DecodeLimits
from semel.media.fetch.download import Downloader
from semel.media.fetch.policy import AddressScope, MediaPolicy
from semel.media.fetch.url import WebUrl
from tests.media.origin import Origin, origin
from tests.security import test_s09_wrong_shapes as s9
from tests.security import test_s1_request_forgery as s1
from tests.security import test_s2_url_parsers as s2
from tests.security import test_s3_rebinding_and_redirects as s3
from tests.security import test_s4_limits_while_streaming as s4
from tests.security import test_s5_bombs as s5
from tests.security import test_s7_words as s7
from tests.security import test_s8_degenerate as s8
from tests.security import test_s10_deserialisation as s10
from tests.security import test_s11_identity as s11
from tests.security import test_s13_canon as s13

ROOT = Path(__file__).parents[2]

PROMISES = (ROOT / "docs/security/threats.md").read_text().partition("<!-- begin scoreboard -->")[0]


TESTS: dict[int, tuple[str, ...]] = {
    1: (
        "test_s1_request_forgery.py::test_whatever_public_hosts_are_allowed_nothing_inside_is_reached",
        "test_s1_request_forgery.py::test_control_a_client_without_a_policy_fetches_from_its_own_machine",
    ),
    2: (
        "test_s2_url_parsers.py::test_a_form_is_refused_or_the_host_that_is_checked_is_the_one_that_is_looked_up",
        "test_s2_url_parsers.py::test_control_two_parsers_disagree_on_many_of_these_forms",
    ),
    3: (
        "test_s3_rebinding_and_redirects.py::test_a_redirect_inside_is_not_followed",
        "test_s3_rebinding_and_redirects.py::test_control_a_client_that_follows_redirects_itself_goes_inside",
    ),
    4: ("test_s4_limits_while_streaming.py::test_bytes_are_counted_as_they_come_and_no_more_is_taken_than_allowed",),
    5: (
        "test_s5_bombs.py::test_pixels_are_refused_by_the_header_before_they_are_allocated_S5",
        "test_s5_bombs.py::test_a_second_does_not_have_any_number_of_samples_S5",
    ),
    6: (
        "test_s6_crash.py::test_media_that_crash_their_process_cost_one_request_and_are_not_given_another_S6",
        "test_s6_crash.py::test_a_mutant_that_forgets_what_crashed_loses_a_process_each_time_S6",
        "test_s6_processes.py::test_memory_beyond_the_limit_costs_one_request_and_no_process_S6",
    ),
    7: (
        "test_s7_words.py::test_whatever_a_decoder_raises_the_client_gets_our_words_S7",
        "test_s7_words.py::test_the_words_of_the_decoder_itself_show_an_address",
    ),
    8: ("test_s8_degenerate.py::test_an_image_without_extent_is_refused_before_any_processor_S8",),
    9: (
        "test_s09_wrong_shapes.py::test_a_wrong_feature_is_never_injected",
        "test_s09_wrong_shapes.py::test_a_naive_engine_is_ended_by_one_request",
    ),
    10: ("test_s10_deserialisation.py::test_a_pickle_is_refused_by_every_reader_and_does_nothing",),
    11: ("test_s11_identity.py::test_parts_that_read_the_same_when_joined_differ_when_framed",),
    12: (
        "test_s12_routes.py::test_nobody_can_tell_whether_another_tenant_was_there",
        "test_s12_routes.py::test_a_mutant_that_shares_what_tenants_send_is_found_by_its_steps",
        "test_s12_references.py::test_a_mutant_that_shares_media_is_found_by_its_steps",
    ),
    13: ("test_s13_canon.py::test_all_eight_orientations_are_applied_S13",),
    14: (
        "test_s14_special_tokens.py::test_what_a_client_types_is_never_a_placeholder",
        "test_s14_special_tokens.py::test_the_naive_way_makes_placeholders_of_text_in_every_family",
    ),
    15: (
        "test_s15_parameters.py::test_numbers_and_lists_that_would_cost_others_are_refused",
        "test_s15_parameters.py::test_a_mutant_that_bounds_the_parts_only_is_found",
    ),
    16: ("test_s16_expansion.py::test_the_naive_way_takes_four_times_as_long_for_twice_the_items_and_ours_twice",),
    17: (
        "test_s17_authentication.py::test_over_a_socket_no_route_but_the_probes_answers_or_reads_a_body_without_a_key",
        "test_s17_authentication.py::test_a_mutant_guard_is_found_over_a_socket",
        "test_s17_roles.py::test_a_frontends_secrets_cannot_open_a_workers_listener_S17",
        "test_s17_roles.py::test_control_with_one_fleet_key_a_frontend_can_be_a_worker",
    ),
    18: (
        "test_s18_starvation.py::test_bodies_that_stall_together_hold_no_more_than_the_process_may",
        "test_s18_fairness.py::test_a_mutant_that_serves_in_the_order_of_arrival_is_found",
        "test_s18_media_store.py::test_beside_uploads_that_a_tenant_left_undone_another_is_served_S18",
        "test_s18_media_store.py::test_mutant_with_one_bound_for_all_the_other_is_refused",
    ),
    19: (
        "test_s19_request_heads.py::test_a_head_without_end_is_refused_after_64_KiB",
        "test_s19_request_heads.py::test_mutant_the_connection_of_uvicorn_takes_heads_without_end",
    ),
    20: (
        "test_s20_grammars.py::test_the_worker_s_loop_has_no_gap_while_large_schemas_are_converted_S20",
        "test_s20_grammars.py::test_mutant_conversion_in_the_loop_stops_it_S20",
        "test_s20_grammars.py::test_mutant_one_queue_for_all_lets_the_small_schema_wait_S20",
    ),
    21: (
        "test_s21_products.py::test_only_a_tenant_that_the_operator_names_may_go_first",
        "test_s21_features.py::test_mutant_a_pipeline_that_counts_at_the_end_makes_them_all",
        "test_s21_turns.py::test_mutant_in_order_of_arrival_it_waits_for_all_of_them",
        "test_s21_shares.py::test_beside_four_stalled_bodies_of_a_tenant_another_s_chat_is_answered",
        "test_s21_shares.py::test_mutant_first_come_first_served_the_other_s_chat_is_refused",
        "test_s21_texts.py::test_mutant_a_route_without_room_charges_the_body_only",
        "test_s21_shares.py::test_mutant_an_uncharged_backlog_grows_without_bound",
        "test_s21_full_disk.py::test_a_tenant_within_its_share_loses_neither_uploads_nor_files_to_a_full_disk_S21",
        "test_s21_full_disk.py::test_mutant_without_eviction_for_the_disk_the_other_tenant_gets_503_S21",
    ),
    22: (
        "test_s22_dead_engines.py::test_failures_before_the_first_token_reach_at_most_one_client_in_a_hundred",
        "test_s22_dead_engines.py::test_of_three_workers_a_request_that_kills_engines_ends_at_most_two_and_once",
        "test_s22_dead_engines.py::test_control_without_strikes_it_ends_all_three",
    ),
    23: (
        "test_s23_takeover.py::test_a_try_from_inside_the_sandbox_is_refused_and_succeeds_without_it_S23",
        "test_s23_takeover.py::test_another_program_in_its_place_is_refused_and_runs_without_the_sandbox_S23",
        "test_s23_takeover.py::test_mutant_without_a_layer_the_try_succeeds_S23",
        "test_s23_sizes.py::test_what_a_process_says_of_sizes_is_not_believed_S23_S21",
        "test_s23_sizes.py::test_control_without_the_bounds_each_lie_works_S23_S21",
    ),
    24: (
        "test_s24_upstream_answers.py::test_a_directive_of_blanks_takes_linear_time",
        "test_s24_upstream_answers.py::test_mutant_quantifiers_that_share_their_blanks_take_quadratic_time",
    ),
    25: (
        "test_s25_connections.py::test_900_idle_connections_at_600_descriptors_leave_the_probes_and_new_clients_alone",
        "test_s25_connections.py::test_control_a_server_without_the_limit_does_not_answer_its_probes",
        "test_s25_keys.py::test_a_revoked_key_is_refused_and_a_new_one_taken_without_a_restart",
        "test_s25_keys.py::test_a_valid_key_never_waits_however_many_wrong_ones_come_from_its_address",
        "test_s25_keys.py::test_mutant_a_throttle_before_the_key_is_checked_lets_the_honest_wait",
    ),
    26: (
        "test_s26_embeddings.py::test_what_somebody_else_has_written_is_never_loaded_and_counted",
        "test_s26_embeddings.py::test_control_vllms_example_connector_loads_whatever_lies_under_the_hash",
    ),
    27: (
        "test_s27_trial.py::test_what_is_expensive_to_follow_is_refused_on_trial_S27",
        "test_s27_trial.py::test_mutant_a_walk_without_limits_goes_on_for_as_long_as_it_is_let_S27",
        "test_s27_trial.py::test_refusals_are_a_tenant_s_own_S27",
    ),
    28: (
        "test_s28_downloads.py::test_a_download_of_one_tenant_is_cut_off_when_another_needs_its_share",
        "test_s28_downloads.py::test_mutant_a_download_that_cannot_be_called_back_refuses_the_other_tenant",
        "test_s28_logs.py::test_a_frontend_whose_log_nobody_reads_answers_probes_tenants_and_strangers",
    ),
    29: (
        "test_s29_expensive_items.py::test_with_one_process_the_spare_takes_the_other_tenant_s_item",
        "test_s29_expensive_items.py::test_mutant_turns_by_item_give_an_expensive_tenant_nearly_all_of_the_time",
    ),
    30: (
        "test_s30_operations.py::test_one_tenant_s_listings_are_bounded_and_another_s_do_not_wait_for_them",
        "test_s30_operations.py::test_mutant_without_a_bound_by_tenant_one_tenant_takes_all_operations",
    ),
    31: (
        "test_s31_failures.py::test_streams_that_a_tenant_has_fail_eject_nobody_while_another_tenant_asks",
        "test_s31_failures.py::test_what_may_leave_no_token_is_400_before_the_engine_and_names_both_fields",
    ),
    32: (
        "test_s32_captured_decoder.py::test_a_long_answer_costs_the_event_loop_nothing_and_ends_its_process_S32",
        "test_s32_captured_decoder.py::test_control_under_the_old_limit_each_of_them_takes_the_event_loop_S32",
    ),
    33: (
        "test_s33_door.py::test_no_route_is_added_to_vllms_server_that_answers_without_its_key_S33",
        "test_s33_door.py::test_the_listener_in_vllms_server_asks_for_the_keys_of_the_fleet_S33",
    ),
    34: (
        "test_s34_rl_routes.py::test_nothing_is_switched_without_the_admin_key_S34",
        "test_s34_rl_routes.py::test_without_vllms_dev_mode_there_are_no_such_routes_S34",
    ),
}
"""By row: the tests without which it would be an empty promise. Their controls are among them."""


def check_test_exists(test_id: str, folder: Path) -> None:
    """A function of that name, which asserts something, and is neither skipped nor expected to fail."""
    file, _, name = test_id.partition("::")
    path = folder / file
    assert path.is_file(), f"there is no {file}"
    functions = [
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name
    ]
    assert len(functions) == 1, f"{file} has no test {name}"
    (function,) = functions
    assert not re.search(r"\b(skip|skipif|xfail)\b", " ".join(map(ast.unparse, function.decorator_list))), test_id
    body = ast.unparse(ast.Module(function.body, []))
    assert re.search(r"^\s*assert |pytest\.raises|\bcheck_\w+\(", body, re.MULTILINE), f"{test_id} asserts nothing"


@pytest.mark.parametrize("row", TESTS, ids=lambda row: f"S{row}")
def test_every_row_is_tied_to_tests_that_exist_and_to_the_page_that_promises_it(row: int) -> None:
    for test_id in TESTS[row]:
        check_test_exists(test_id, ROOT / "tests" / "security")
    lines = [line for line in PROMISES.splitlines() if line.startswith(f"| S{row} |")]
    assert len(lines) == 1, f"docs/security/threats.md has {len(lines)} lines for S{row}"
    named = re.findall(r"tests/security/(test_\w+\.py)", lines[0])
    assert named
    assert {test_id.partition("::")[0] for test_id in TESTS[row]} <= set(named)


def test_the_page_promises_no_row_without_tests() -> None:
    promised = re.findall(r"^\| S(\d+) \|", PROMISES, re.MULTILINE)
    assert sorted(map(int, promised)) == sorted(TESTS)


@pytest.mark.parametrize(
    "text",
    [
        "# S7: def test_it() is to be written\n",
        '"""S7"""\n\ndef test_it_all():\n    assert True\n',
        "def test_it():\n    pass  # S7\n",
        "import pytest\n\n@pytest.mark.skip\ndef test_it():\n    assert True\n",
        "import pytest\n\n@pytest.mark.xfail(reason='S7')\ndef test_it():\n    assert False\n",
    ],
    ids=["a comment", "another name", "nothing asserted", "skipped", "expected to fail"],
)
def test_a_mutant_row_whose_test_only_looks_like_one_is_found(text: str, tmp_path: Path) -> None:
    """What a search for `S7` and `def test_` in the file has let pass."""
    (tmp_path / "test_s7_words.py").write_text(text)
    with pytest.raises(AssertionError):
        check_test_exists("test_s7_words.py::test_it", tmp_path)


@dataclass(frozen=True)
class Mutant:
    """Wrong code for a row, and a call of the test that has to fail on it."""

    call: Callable[[], Awaitable[None] | None]
    patches: tuple[tuple[Any, str, Any], ...]
    error: type[BaseException] | tuple[type[BaseException], ...] = (AssertionError, pytest.fail.Exception)
    """How the test fails."""


@asynccontextmanager
async def secret(host: str = "127.0.0.1") -> AsyncIterator[Origin]:
    async with origin(host) as made:
        made["/"] = made["/latest/meta-data"] = s1.SECRET
        yield made


async def reach_inside() -> None:
    async with secret() as inside:
        await s1.test_whatever_public_hosts_are_allowed_nothing_inside_is_reached(
            inside, ("*", "*:{port}"), "127.0.0.1"
        )


async def follow_inside() -> None:
    async with secret(s3.INSIDE) as inside, origin(s3.OUTSIDE) as outside:
        await s3.test_a_redirect_inside_is_not_followed(inside, outside, 302)


async def take_all() -> None:
    async with origin() as server:
        await s4.test_bytes_are_counted_as_they_come_and_no_more_is_taken_than_allowed(server, "in chunks")


async def read_all(_: Downloader, response: Any, spend: Callable[[int], None]) -> bytes:
    data: bytes = await response.content.read()
    spend(len(data))
    return data


def another_parser(text: str) -> WebUrl:
    """The standard library's, which takes what ours refuses."""
    try:
        parts = urlsplit(text)
        return WebUrl("https", parts.hostname or "", parts.port or 443, parts.path or "/")
    except ValueError:
        raise InvalidRequest("no URL") from None


async def parse_everything() -> None:
    for form in s2.FORMS:
        await s2.test_a_form_is_refused_or_the_host_that_is_checked_is_the_one_that_is_looked_up(form)


def say_what_was_raised() -> None:
    with pytest.MonkeyPatch.context() as patch:
        logs: Any = type("Logs", (), {"set_level": lambda *_: None, "text": s7.SECRET * 3})()
        s7.test_whatever_a_decoder_raises_the_client_gets_our_words_S7(ValueError, patch, logs)


def unpickle(data: bytes) -> None:
    try:
        pickle.loads(data)
    except Exception as error:
        raise InvalidRequest("no file") from error
    raise InvalidRequest("no file")


def read_pickle(folder: Path) -> None:
    s10.test_a_pickle_is_refused_by_every_reader_and_does_nothing("injected files", folder)


def naive_decode(data: bytes) -> object:
    return Image.open(io.BytesIO(data)).load()


MUTANTS: dict[str, Mutant] = {
    "S1 every address is public": Mutant(
        reach_inside, ((AddressScope, "covers", lambda *_: True), (MediaPolicy, "check", lambda *_, **__: None))
    ),
    "S2 two parsers": Mutant(parse_everything, ((s2, "parse_url", another_parser),), (AssertionError, ConfigError)),
    "S3 no check at a hop": Mutant(
        follow_inside, ((AddressScope, "covers", lambda *_: True), (MediaPolicy, "check", lambda *_, **__: None))
    ),
    "S4 all of a body is read": Mutant(take_all, ((Downloader, "_body", read_all),)),
    "S5 rates are not checked": Mutant(
        lambda: s5.test_a_second_does_not_have_any_number_of_samples_S5(384_001),
        ((audio, "_check_form", lambda *_: None),),
    ),
    "S7 a decoder's own words": Mutant(
        say_what_was_raised, ((s7, "DECODERS", {**s7.DECODERS, "image": naive_decode}),), ValueError
    ),
    "S8 sizes are not checked": Mutant(
        lambda: s8.test_an_image_without_extent_is_refused_before_any_processor_S8((1, 1)),
        ((DecodeLimits, "check_size", lambda *_, **__: None),),
    ),
    "S9 no contract": Mutant(
        lambda: s9.test_a_wrong_feature_is_never_injected(next(iter(s9.WRONG.values()))),
        ((Contract, "check", lambda *_: None),),
    ),
    "S11 parts are joined": Mutant(
        lambda: s11.test_parts_that_read_the_same_when_joined_differ_when_framed((b"ab", b"c"), (b"a", b"bc")),
        ((s11, "frame", lambda parts: [b"".join(parts)]),),
    ),
    "S13 an orientation is not applied": Mutant(
        lambda: s13.test_all_eight_orientations_are_applied_S13(6, "PNG"), ((image, "_upright", lambda shown: shown),)
    ),
}


async def run(mutant: Mutant) -> None:
    outcome = mutant.call()
    if inspect.isawaitable(outcome):
        await outcome


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
async def test_a_test_of_the_row_passes_as_it_is_and_fails_on_its_mutant(
    mutant: Mutant, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run(mutant)
    for target, name, wrong in mutant.patches:
        monkeypatch.setattr(target, name, wrong)
    with pytest.raises(mutant.error):
        await run(mutant)


def test_a_mutant_that_unpickles_fails_the_test_of_S10(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_pickle(tmp_path)
    (tmp_path / "naive").unlink()
    monkeypatch.setitem(s10.READERS, "injected files", unpickle)
    with pytest.raises(AssertionError):
        read_pickle(tmp_path)
