"""Queries and hits of the item caches: what is counted, exported and logged."""

from __future__ import annotations

from semel.telemetry import CacheLookups, Meter


def test_queries_and_hits_are_exported_by_model_modality_and_tier_and_under_vllm_s_names_D8() -> None:
    lookups, meter = CacheLookups(), Meter()
    meter.watch(lookups.samples)
    lookups.count("m", "image", "processor", 3, False)
    lookups.count("m", "image", "processor", 2, True)
    lookups.count("m", "audio", "processor", 1, True)
    lookups.count("m", "image", "worker", 4, True)
    text = meter.render().decode()
    assert 'semel_mm_cache_queries_total{modality="image",model="m",tier="processor"} 5.0' in text
    assert 'semel_mm_cache_hits_total{modality="image",model="m",tier="processor"} 2.0' in text
    assert 'semel_mm_cache_hits_total{modality="image",model="m",tier="worker"} 4.0' in text
    assert 'vllm:mm_cache_queries_total{model_name="m"} 6.0' in text
    assert 'vllm:mm_cache_hits_total{model_name="m"} 3.0' in text


def test_the_line_in_the_log_tells_the_hit_rate_since_the_last_one_D8() -> None:
    lookups = CacheLookups()
    assert lookups.line() is None
    lookups.count("m", "image", "processor", 3, True)
    lookups.count("m", "image", "processor", 1, False)
    assert lookups.line() == "item cache hits: processor 75.0% of 4"
    lookups.count("m", "image", "worker", 1, False)
    assert lookups.line() == "item cache hits: worker 0.0% of 1"
    assert lookups.line() is None
