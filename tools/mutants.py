"""Wrong versions of the product, each with the test that must notice: `python -m tools.mutants`, or `scripts/mutants`.

Most do not pass a setting on where processes are put together: tests of a component cannot see that. A mutant is a
text in a file of `src/semel` and what stands in its place. Those whose tests share their processes are put in together,
unless one hides another, and each of their tests has to fail; `--apart` puts each in alone. The control is the source
as it is, with which all of these tests pass.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["MUTANTS", "Mutant", "apply"]

ROOT: Final = Path(__file__).parent.parent
DEADLINE_S: Final = 900

SERVED: Final = "tests/wiring/test_served_flags.py"
EDGE: Final = "tests/wiring/test_edge_flags.py"
FRONTEND: Final = "compose/frontend.py"
WORKER: Final = "compose/worker.py"


@dataclass(frozen=True)
class Mutant:
    """A text that stands once in a file, what it becomes, and the test that fails then."""

    name: str
    file: str
    text: str
    becomes: str
    test: str
    is_alone: bool = False
    """Others would hide it, or it others, if they were put in together."""

    @property
    def test_file(self) -> str:
        """The file of the test."""
        return self.test.partition("::")[0]


def _unpassed(name: str, file: str, text: str, test: str, becomes: str = "", *, is_alone: bool = False) -> Mutant:
    return Mutant(f"{name} is not passed on", file, text, becomes, test, is_alone)


MUTANTS: Final[Sequence[Mutant]] = (
    _unpassed(
        "--require-sandbox",
        FRONTEND,
        "            requires_sandbox=preprocessing.require_sandbox,\n",
        f"{EDGE}::test_a_frontend_that_requires_a_sandbox_refuses_to_start_without_one",
    ),
    _unpassed(
        "--priority-tenant",
        FRONTEND,
        "        priority_tenants=frozenset(serving.keys.priority_tenants),\n",
        f"{SERVED}::test_only_the_tenant_with_priority_may_set_one",
    ),
    _unpassed(
        "--unknown-fields",
        FRONTEND,
        "        unknown_fields_mode=serving.unknown_fields,\n",
        f"{SERVED}::test_an_unknown_field_is_refused",
    ),
    _unpassed(
        "--metrics-per-tenant",
        FRONTEND,
        "        metrics_per_tenant=serving.metrics_per_tenant,\n",
        f"{SERVED}::test_metrics_are_by_tenant",
    ),
    _unpassed(
        "--max-frontends",
        WORKER,
        ", max_peers=settings.sessions.max_frontends",
        f"{SERVED}::test_a_worker_takes_so_many_frontends",
    ),
    _unpassed(
        "--eject-after-failures",
        FRONTEND,
        "FleetHealth(self.settings.ejection, meter=self.meter)",
        f"{SERVED}::test_a_worker_that_fails_once_is_ejected",
        "FleetHealth(meter=self.meter)",
    ),
    _unpassed(
        "--forwarded-allow-ips",
        FRONTEND,
        "        proxies=serving.peers.proxies,\n",
        f"{EDGE}::test_a_named_proxy_says_who_its_client_is",
    ),
    _unpassed(
        "the check of Host and Origin",
        FRONTEND,
        "        allowed_hosts=hosts,\n",
        f"{EDGE}::test_another_host_and_a_page_of_another_origin_are_refused",
    ),
    _unpassed(
        "the limit of an offer",
        FRONTEND,
        "OfferLimits(max_tokens=contract.max_tokens)",
        f"{SERVED}::test_an_image_that_no_prompt_can_have_is_refused_where_it_is_made",
        "OfferLimits()",
    ),
    _unpassed(
        "the pipeline's max_tokens",
        FRONTEND,
        "            max_tokens=max_tokens,\n",
        f"{SERVED}::test_images_that_no_prompt_can_have_are_refused_before_it_is_put_together",
    ),
    _unpassed(
        "the limit of a stalled client",
        FRONTEND,
        "stall_s=serving.body.max_s",
        f"{EDGE}::test_a_client_that_reads_nothing_is_given_up",
        "stall_s=120.0",
    ),
    _unpassed(
        "the limit of a stalled head",
        FRONTEND,
        "headers_s=serving.body.max_s",
        f"{EDGE}::test_a_head_that_does_not_come_is_given_up",
        "headers_s=120.0",
    ),
    _unpassed(
        "what the pool says to /ready",
        FRONTEND,
        "            service.watch_pool(lambda: pool.refusal)\n",
        f"{SERVED}::test_a_frontend_without_a_pool_is_not_ready",
    ),
    # The same kind.
    _unpassed(
        "--disable-metrics-per-worker",
        FRONTEND,
        ", per_worker=per_worker",
        f"{SERVED}::test_metrics_are_not_by_worker",
    ),
    _unpassed(
        "--max-waiting-requests",
        FRONTEND,
        "Budget(serving.budget)",
        f"{SERVED}::test_requests_over_those_that_may_wait_are_refused",
        "Budget()",
    ),
    _unpassed(
        "--max-tenant-requests",
        FRONTEND,
        "RequestLimiter(serving.concurrency)",
        f"{SERVED}::test_requests_in_flight_over_the_limits_are_refused_and_tenants_take_no_turns",
        "RequestLimiter()",
    ),
    _unpassed(
        "--max-body-bytes",
        FRONTEND,
        "        body=serving.body,\n",
        f"{SERVED}::test_a_body_over_a_limit_is_refused",
    ),
    _unpassed(
        "--max-refusals-per-s",
        FRONTEND,
        "        refusals=serving.refusals,\n",
        f"{EDGE}::test_refusals_are_delayed_beyond_their_rate",
    ),
    _unpassed(
        "--max-media-bytes for uploads",
        FRONTEND,
        "        max_file_bytes=serving.fetch.limits.max_bytes,\n",
        f"{SERVED}::test_an_upload_over_the_limit_is_refused",
    ),
    _unpassed(
        "--max-audio-s",
        FRONTEND,
        "            limits=self.settings.serving.decode,\n",
        f"{EDGE}::test_a_clip_over_a_limit_is_refused",
    ),
    _unpassed(
        "--max-image-pixels",
        FRONTEND,
        "            limits=self.settings.serving.decode,\n",
        f"{SERVED}::test_a_medium_over_a_limit_is_refused",
    ),
    _unpassed(
        "--allowed-origins",
        FRONTEND,
        "        cors=serving.cors,\n",
        f"{EDGE}::test_a_page_of_the_named_origin_may_do_what_the_flags_say",
    ),
    _unpassed(
        "--max-processing-s",
        FRONTEND,
        "            timeout_s=preprocessing.limits.timeout_s,\n",
        f"{SERVED}::test_an_item_that_takes_too_long_is_given_up",
        is_alone=True,  # without --request-timeout-s, which another leaves out, nothing comes before 30 s
    ),
    _unpassed(
        "--chat-template-content-format",
        FRONTEND,
        ", template, tokenizer, content_format\n",
        f"{SERVED}::test_the_chat_template_and_its_format_are_the_operators",
        ", template, tokenizer\n",
        is_alone=True,  # no prompt of the others has an image then
    ),
    _unpassed(
        "--drain-delay-s",
        FRONTEND,
        "stopping, settings.drain_delay_s)",
        f"{SERVED}::test_a_frontend_that_ends_waits_as_long_as_its_flags_say",
        "stopping, 0)",
    ),
    _unpassed(
        "--announce-interval-s",
        WORKER,
        "CacheUpdates(settings.sessions.announce_interval_s)",
        f"{SERVED}::test_a_worker_reports_its_load_as_seldom_as_the_flag_says",
        "CacheUpdates()",
    ),
    _unpassed(
        "--engine-progress-s",
        WORKER,
        "            progress_s=progress_s,\n",
        f"{SERVED}::test_an_engine_without_progress_ends_its_worker",
    ),
    _unpassed(
        "--max-schema-bytes",
        WORKER,
        ", grammars=settings.grammars)",
        f"{SERVED}::test_the_engine_is_started_with_what_the_worker_was",
        ", grammars=type(settings.grammars)())",
    ),
    _unpassed(
        "--embedding-publish-min-requests",
        WORKER,
        "publish_after=publish_after, ",
        f"{SERVED}::test_the_embedding_store_is_used_as_the_worker_was_told",
        "publish_after=2, ",
    ),
    # Others that tests of a component did not see.
    Mutant(
        "a store's certificate may be for another host",
        "embeddings/nodes.py",
        "        return ssl.create_default_context(cafile=settings.ca)\n",
        "        context = ssl.create_default_context(cafile=settings.ca)\n"
        "        context.check_hostname = False\n"
        "        return context\n",
        "tests/embeddings/test_node_certificate.py::test_a_node_whose_certificate_is_for_another_host_is_refused",
    ),
    Mutant(
        "new weights do not end sharing",
        "worker/embedding_sync.py",
        "if self._tier.has_new_weights else",
        "if False else",
        "tests/worker/test_new_weights.py::test_a_worker_never_shares_again_after_new_weights",
    ),
    Mutant(
        "new weights end sharing with the engine's next step only",
        "engine/vllm/tier/host.py",
        "return self._has_new_weights or self._page.has_new_weights",
        "return self._page.has_new_weights",
        "tests/engine/test_host_tier.py::test_new_weights_are_known_before_the_engine_core_hears_of_them",
    ),
    Mutant(
        "an engine makes steps while its weights change",
        "engine/vllm/control.py",
        "            was_running = not await self._llm.is_paused()\n",
        "            was_running = False\n",
        "tests/engine/test_control.py::test_weights_change_between_two_steps_and_nothing_of_before_outlives_it",
    ),
    Mutant(
        "a resume leaves a pause waiting for requests that never cease",
        "engine/vllm/control.py",
        "            pausing.cancel()\n",
        "            pass\n",
        "tests/engine/test_control_order.py::test_any_order_of_calls_ends_loses_nothing_and_is_told_S22_B8",
    ),
    Mutant(
        "an engine's process tells nobody of new weights",
        "engine/vllm/plugins/worker.py",
        "            get_ec_transfer().forget_saved()\n",
        "            get_ec_transfer()\n",
        "tests/worker/test_new_weights.py::test_the_process_of_an_engine_tells_its_tier_of_new_weights",
    ),
    Mutant(
        "`semel verify` compares nothing of what it asks eight at a time",
        "lab/verify/parity.py",
        "later = differences(parity.questions, parity.semel_at_once, parity.vllm, tolerance)",
        "later: list[Difference] = []",
        "tests/verify/test_verify.py::test_answers_that_differ_only_at_once_are_found",
    ),
    Mutant(
        "inspection in the pool has no tenant",
        "render/inspector.py",
        "await lay_out(media, options, group=request, tenant=request.tenant)",
        "await lay_out(media, options, group=request)",
        "tests/render/test_tenants_in_the_pool.py::test_what_is_inspected_in_the_pool_is_its_tenants",
    ),
    Mutant(
        "assembly in the pool has no tenant",
        "render/pipeline.py",
        "await self.apply(token_ids, pairs, tenant=self.tenant)",
        "await self.apply(token_ids, pairs)",
        "tests/render/test_tenants_in_the_pool.py::test_what_is_assembled_in_the_pool_is_its_tenants",
    ),
    Mutant(
        "tokens of prompts are counted before a worker has taken them",
        "frontend/execution.py",
        "    stream = await serving.fleet.submit(worker, submission, make, kind)\n",
        "    serving.fleet.tokens[serving.contract.model].prompt += len(submission.prompt.token_ids)\n"
        "    stream = await serving.fleet.submit(worker, submission, make, kind)\n",
        "tests/frontend/test_prompt_tokens.py::test_only_prompts_that_a_worker_has_taken_are_counted",
    ),
)


def apply(mutants: Iterable[Mutant], source: Path) -> None:
    """Put mutants into a copy of `src/semel`; a `ValueError` names one whose text does not stand there once.

    Several may have the same text, and become the same.
    """
    for file, text, becomes in dict.fromkeys((one.file, one.text, one.becomes) for one in mutants):
        path = source / file
        before = path.read_text()
        if before.count(text) != 1:
            raise ValueError(f"{file} has this {before.count(text)} times, not once: {text.strip()}")
        path.write_text(before.replace(text, becomes))


def failed_tests(mutants: Sequence[Mutant], tests: Sequence[str]) -> dict[str, str]:
    """Run tests with these mutants put in. Returns those that did not pass, with the first line of the reason."""
    with tempfile.TemporaryDirectory(prefix="semel-mutants-") as name:
        home = Path(name)
        shutil.copytree(ROOT / "src" / "semel", home / "src" / "semel", ignore=shutil.ignore_patterns("__pycache__"))
        apply(mutants, home / "src" / "semel")
        report = home / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *tests]
        environment = os.environ | {"PYTHONPATH": f"{home / 'src'}{os.pathsep}{ROOT}", "TMPDIR": name}
        subprocess.run(command, cwd=ROOT, env=environment, timeout=DEADLINE_S, stdout=subprocess.DEVNULL, check=False)
        return dict(_failures(report)) if report.exists() else {}


def _failures(report: Path) -> Iterator[tuple[str, str]]:
    for case in ET.parse(report).iter("testcase"):
        for kind in ("failure", "error"):
            if (found := case.find(kind)) is not None:
                path = f"{case.get('classname', '').replace('.', '/')}.py"
                test = f"{path}::{case.get('name', '').partition('[')[0]}"
                yield test, f"{kind}: {(found.get('message') or '').partition(chr(10))[0]}"


def _in_order(tests: Iterable[str]) -> list[str]:
    """Tests in the order of their files: those that leave something behind stand last there."""

    def position(test: str) -> tuple[str, int]:
        path, _, name = test.partition("::")
        return path, (ROOT / path).read_text().index(f"def {name}(")

    return sorted(set(tests), key=position)


def _dies(reason: str, *, apart: bool) -> bool:
    """Whether a test has failed by what it asserts; if its process is gone, another mutant may have ended it."""
    if any(one in reason for one in ("ConnectError", "ConnectionRefused", "NoSuchProcess")):
        return apart
    return reason.startswith("failure") or (apart and bool(reason))


def _groups(mutants: Sequence[Mutant], *, apart: bool) -> list[list[Mutant]]:
    groups: dict[str, list[Mutant]] = {}
    for one in mutants:
        groups.setdefault(one.name if apart or one.is_alone else one.test_file, []).append(one)
    return list(groups.values())


def main() -> None:
    """Print a line for each mutant; the exit code says whether one lives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="mutants whose name or test has this text")
    parser.add_argument("--apart", action="store_true", help="each alone: processes are started for each")
    parser.add_argument("--no-control", action="store_true", help="do not run the tests without any mutant first")
    options = parser.parse_args()
    chosen = [one for one in MUTANTS if options.only in f"{one.name} {one.test}"]
    bad = 0
    if not options.no_control:
        for test, why in failed_tests([], _in_order(one.test for one in chosen)).items():
            print(f"FAILS WITHOUT A MUTANT  {test}: {why}")
            bad += 1
    for group in _groups(chosen, apart=options.apart):
        found = failed_tests(group, _in_order(one.test for one in group))
        for one in group:
            dies = _dies(found.get(one.test, ""), apart=options.apart)
            bad += not dies
            print(
                f"{'dies ' if dies else 'LIVES'}  {one.name}  →  {one.test}  {found.get(one.test, '')[:120]}",
                flush=True,
            )
    print(f"{len(chosen)} mutants, {bad} faults")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
