"""The scoreboard has every row once, and its upstream tells whether somebody went where nobody should."""

from __future__ import annotations

import httpx

from tools.security.scoreboard import ATTEMPTS, BEGIN, END, INSIDE_ONLY, PAGE, Upstream, page_of


def test_every_row_is_tried_or_says_why_not() -> None:
    assert ATTEMPTS.keys() | INSIDE_ONLY.keys() == {f"S{number}" for number in range(1, 27)}
    assert not ATTEMPTS.keys() & INSIDE_ONLY.keys()


def test_the_page_has_a_line_for_each_row_of_both() -> None:
    page = page_of(f"before\n{BEGIN}old\n{END}after\n", {"semel": {"S5": "400"}, "vllm": {"S5": "**died**"}})
    assert page.startswith("before\n")
    assert page.endswith("after\n")
    assert "old" not in page
    assert "| S5 | a PNG of 13,000 × 13,000 pixels | 400 | **died** |" in page
    assert "| S1 | an image URL that leads into the network | not tried | not tried |" in page
    table = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    assert [line.split(" | ")[0] for line in table.splitlines()[2:]] == [f"| S{number}" for number in range(1, 27)]


async def test_who_follows_a_redirect_is_seen() -> None:
    upstream = Upstream()
    async with upstream.serving(), httpx.AsyncClient() as client:
        await client.get(f"{upstream.url}/redirect.png")
        assert upstream.reached == 0
        await client.get(f"{upstream.url}/redirect.png", follow_redirects=True)
        assert upstream.reached == 1
