"""Tags, seals and digests of features: clients store them, so that of fixed values they never change."""

from __future__ import annotations

from dataclasses import replace

import pytest

from semel.core import Digest, Feature, Key, Layout, Mask, Origin, Tenant, Tensor
from semel.frontend.items.ownership import feature_digest, has_tag, is_sealed, tag_of

KEY = Key(bytes(range(32)))
DIGEST = Digest(bytes(range(32, 64)))
FEATURE = Feature(
    "image",
    {"a": Tensor("uint8", (3,), memoryview(b"abc")), "b": Tensor("uint8", (0,), memoryview(b""))},
    Layout((1, 2), Mask([True, False])),
)


@pytest.mark.parametrize(
    ("tenant", "tag", "made", "seal"),
    [
        (
            Tenant(),
            "2975e79bde8618f9b271f0b0c59ebe29",
            "964050ecbaebbe7ac27d158307b19a2838147adfb8eadf39fae7de206cd003a1",
            "607a589cbc816403087db239c0650a18",
        ),
        (
            Tenant("acme"),
            "cd78aef26910f36424a43fa8595dd3c6",
            "97264daf860a7a3f97891d3f466b4351428460a69eae4832d083dcbe82cf8329",
            "058e1e2f6b8213db149b6426cf262c7a",
        ),
        (
            Tenant("", ""),
            "3e3befe07500cd29963c61f37df8c14d",
            "b49897006ffd9e9efa4488245cea236d74452694795b5152f12a3f26f48b1c0c",
            "5ec1de2859aa093df9b8725d0180d74a",
        ),
        (
            Tenant("acme", "sält"),
            "4e622a44d2285c792b3073cf987cd840",
            "b310a4c73dda5de7671935d820b071c4862ae45d1eaa60d25f85c2fd8c70b353",
            "576cea8e9d69cf3e835a8b0ab202c504",
        ),
    ],
)
def test_what_is_shown_of_a_tenants_items_is_stable(tenant: Tenant, tag: str, made: str, seal: str) -> None:
    assert tag_of(DIGEST, tenant, KEY) == tag
    assert feature_digest(FEATURE, tenant, KEY).hex() == made
    assert has_tag(DIGEST, tag, tenant, KEY)
    assert is_sealed(DIGEST, Digest(bytes.fromhex(made)), seal, KEY)


def test_the_origin_of_a_feature_is_part_of_its_identity_S9() -> None:
    made = {
        feature_digest(replace(FEATURE, origin=origin), Tenant(), KEY)
        for origin in (None, Origin((56, 56)), Origin((56, 84)), Origin((56, 56), None, {"min_pixels": 1}))
    }
    assert len(made) == 4
