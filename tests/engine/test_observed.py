"""What a span tells of an answer; and that where nobody sees the span, nothing is done for any token."""

from __future__ import annotations

from opentelemetry.trace import INVALID_SPAN

from semel.core import Prompt, Submission, Timeline
from semel.engine.observed import Observed
from tests.telemetry.spans import Traced

SUBMISSION = Submission("r", Prompt((1, 2, 3), Timeline.decoder([]), ()), {}, {"max_tokens": 7})


async def test_an_answer_is_observed_only_where_somebody_sees_its_span() -> None:
    assert Observed.begin(INVALID_SPAN, SUBMISSION, "tiny") is None
    spans = Traced()
    unsampled = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
    seen = spans.tracing.begin("seen", {})
    unseen = spans.tracing.begin("unseen", {"traceparent": unsampled})
    assert Observed.begin(unseen, SUBMISSION, "tiny") is None
    observed = Observed.begin(seen, SUBMISSION, "tiny")
    assert observed is not None
    observed.end()
    observed.end()
    seen.end()
    attributes = (await spans.sent()).one("seen").attributes
    assert attributes is not None
    assert attributes["gen_ai.usage.input_tokens"] == 3
    assert attributes["gen_ai.request.max_tokens"] == 7
    assert attributes["gen_ai.usage.output_tokens"] == 0
