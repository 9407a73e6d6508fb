"""How each flag is seen to act through the processes that a user starts: the test that fails if it is not passed on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

__all__ = ["FRONTEND", "SERVE", "WORKER", "Seen"]

SERVED: Final = "tests/wiring/test_served_flags.py"
EDGE: Final = "tests/wiring/test_edge_flags.py"
ASSEMBLY: Final = "tests/wiring/test_assembly.py"


@dataclass(frozen=True)
class Seen:
    """Where a flag is off its default, and what then sees it."""

    line: str
    """The command line of `tests.wiring.lines`; empty if the test has its own."""

    test: str


def _rows(line: str, file: str, tests: Mapping[str, str]) -> dict[str, Seen]:
    return {flag: Seen(line, f"{file}::{test}") for test, flags in tests.items() for flag in flags.split()}


FRONTEND: Final[Mapping[str, Seen]] = {
    **_rows(
        "served frontend",
        SERVED,
        {
            "test_a_frontend_is_where_its_flags_say_with_the_workers_of_its_file": "fleet-key-file worker-file host "
            "port metrics-port metrics-host trust-remote-code",
            "test_the_prefix_of_a_config_file_is_taken_off": "config",
            "test_the_chat_template_and_its_format_are_the_operators": "chat-template chat-template-content-format",
            "test_the_keys_of_the_file_are_needed": "api-keys-file",
            "test_only_the_tenant_with_priority_may_set_one": "priority-tenant",
            "test_an_adapter_is_there_for_its_tenants_alone_S12": "adapter-tenants",
            "test_an_unknown_field_is_refused": "unknown-fields",
            "test_metrics_are_by_tenant": "metrics-per-tenant",
            "test_metrics_are_not_by_worker": "disable-metrics-per-worker",
            "test_both_processes_name_their_cell_and_log_in_json": "cell log-format disable-uvicorn-access-log",
            "test_spans_of_both_go_to_the_collector": "otlp-traces-endpoint",
            "test_media_come_from_the_named_host_and_network_each_time": "allowed-media-domains allow-media-http "
            "allowed-media-networks media-cache-gb",
            "test_a_host_that_does_not_answer_is_given_up": "media-timeout-s",
            "test_files_of_the_folder_are_read_up_to_the_limit": "allowed-local-media-path max-media-bytes",
            "test_uploads_lie_in_the_folder_for_their_time_and_within_its_size": "media-store media-store-gb "
            "media-store-ttl-s",
            "test_a_response_is_stored_and_continued": "store-responses",
            "test_a_medium_over_a_limit_is_refused": "max-image-pixels min-image-side max-video-s max-video-frames "
            "max-video-pixels",
            "test_a_document_over_a_limit_is_refused": "max-document-pages max-document-bytes max-document-dpi",
            "test_the_pool_has_its_processes_with_their_memory": "preprocessing-processes max-processing-memory-gb",
            "test_the_feature_cache_is_in_the_process_and_of_its_size": "feature-cache feature-cache-gb",
            "test_a_body_over_a_limit_is_refused": "max-body-bytes max-body-values max-body-text-bytes",
            "test_a_request_over_its_bytes_is_refused": "max-request-media-bytes",
            "test_the_bytes_of_all_requests_are_limited": "max-media-bytes-in-flight",
            "test_requests_over_those_that_may_wait_are_refused": "max-waiting-requests",
            "test_requests_in_flight_over_the_limits_are_refused_and_tenants_take_no_turns": "max-requests "
            "max-tenant-requests",
            "test_a_request_that_takes_too_long_is_ended": "request-timeout-s",
            "test_connections_of_one_address_are_limited": "max-address-connections",
            "test_a_connection_without_a_first_request_is_closed_and_one_that_is_idle_too": "first-request-s "
            "keep-alive-s",
            "test_an_item_that_takes_too_long_is_given_up": "max-processing-s",
            "test_a_worker_that_fails_once_is_ejected": "eject-after-failures",
            "test_a_frontend_that_ends_waits_as_long_as_its_flags_say": "drain-delay-s drain-s",
        },
    ),
    **_rows(
        "edge frontend",
        EDGE,
        {
            "test_workers_are_those_of_dns_and_of_the_flag_with_the_keys_of_the_folder": "key-dir worker worker-dns",
            "test_a_service_of_kubernetes_is_asked_for": "worker-endpoint-slices",
            "test_a_client_needs_a_certificate_and_a_cipher_of_the_list": "ssl-certfile ssl-keyfile ssl-ca-certs "
            "ssl-cert-reqs ssl-ciphers enable-ssl-refresh",
            "test_the_key_of_the_flag_is_needed": "api-key",
            "test_another_host_and_a_page_of_another_origin_are_refused": "allowed-hosts",
            "test_a_named_proxy_says_who_its_client_is": "forwarded-allow-ips",
            "test_a_page_of_the_named_origin_may_do_what_the_flags_say": "allowed-origins allowed-methods "
            "allowed-headers allow-credentials",
            "test_a_clip_over_a_limit_is_refused": "max-audio-s max-audio-channels",
            "test_a_head_over_a_limit_is_refused": "max-head-bytes max-head-fields",
            "test_connections_are_limited": "max-connections",
            "test_a_bucket_that_does_not_answer_is_given_up": "media-store-timeout-s",
            "test_a_body_that_does_not_come_is_given_up": "max-body-s",
            "test_refusals_are_delayed_beyond_their_rate": "max-refusals-per-s",
        },
    ),
    **_rows(
        "sandboxed frontend",
        EDGE,
        {"test_a_frontend_that_requires_a_sandbox_refuses_to_start_without_one": "require-sandbox skip-checks"},
    ),
    **_rows("", SERVED, {"test_the_prefix_of_a_config_file_is_taken_off": "root-path"}),  # by its --config
    # No process has a DNS server of its own, and vLLM's processor takes a minute: the shipped assembly shows these.
    **_rows("", ASSEMBLY, {"test_names_are_looked_up_as_often_as_the_flag_says": "worker-dns-interval-s"}),
    **_rows("", ASSEMBLY, {"test_the_pool_is_started_with_the_processor_of_the_flag": "processor"}),
}

WORKER: Final[Mapping[str, Seen]] = {
    **_rows(
        "served worker",
        SERVED,
        {
            "test_a_frontend_is_where_its_flags_say_with_the_workers_of_its_file": "listen fleet-key-file skip-checks",
            "test_both_processes_name_their_cell_and_log_in_json": "cell log-format admin-port metrics-host",
            "test_spans_of_both_go_to_the_collector": "otlp-traces-endpoint",
            "test_requests_in_flight_over_the_limits_are_refused_and_tenants_take_no_turns": "disable-tenant-turns",
            "test_the_engine_is_started_with_what_the_worker_was": "config processor trust-remote-code "
            "max-schema-bytes max-request-schema-bytes max-schema-compile-s structured-outputs-kinds",
            "test_the_encoder_is_set_as_the_worker_was": "encoder-planning disable-lazy-mm-transfer "
            "encoder-cache-embeddings embedding-tier-gb embedding-staging-mb",
            "test_the_embedding_store_is_reached_by_password_and_certificate_and_its_entries_expire": "embedding-store "
            "embedding-store-password-file embedding-store-ca embedding-store-plain embedding-store-ttl-s",
            "test_the_embedding_store_is_used_as_the_worker_was_told": "embedding-publish-min-requests "
            "embedding-fetch-ms",
            "test_the_admin_address_wants_its_key": "admin-key-file",
            "test_a_worker_takes_so_many_frontends": "max-frontends",
            "test_a_worker_reports_its_load_as_seldom_as_the_flag_says": "announce-interval-s",
            "test_an_engine_without_progress_ends_its_worker": "engine-progress-s",
        },
    ),
    **_rows(
        "edge worker",
        EDGE,
        {
            "test_workers_are_those_of_dns_and_of_the_flag_with_the_keys_of_the_folder": "key-dir",
            "test_a_worker_that_ends_waits_as_long_as_its_flags_say": "drain-delay-s drain-s",
        },
    ),
}

SERVE: Final[Mapping[str, Seen]] = {
    **_rows("", "tests/serve/test_workers.py", {"test_two_workers_share_the_machine_and_the_requests": "workers"}),
    **_rows("", ASSEMBLY, {"test_serve_shows_everything_at_a_terminal_if_it_is_verbose": "verbose"}),
}
"""The flags that only `semel serve` has; all others it hands on, which tests/cli/test_flags.py shows."""
