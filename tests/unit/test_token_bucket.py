"""Token buckets: how many at once, how many after that, and when there is the next."""

from __future__ import annotations

from sandkasten.admission.quotas import TokenBucket


def test_a_bucket_gives_its_burst_and_then_its_rate() -> None:
    """A long silence saves up no more than the burst."""
    now_s = 0.0
    bucket = TokenBucket(per_s=2, burst=3, clock=lambda: now_s)
    assert [bucket.take() for _ in range(4)] == [0, 0, 0, 0.5]
    now_s = 0.5
    assert [bucket.take() for _ in range(2)] == [0, 0.5]
    now_s = 3600
    assert [bucket.take() for _ in range(4)] == [0, 0, 0, 0.5]
