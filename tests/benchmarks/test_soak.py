"""Steps without end: nothing grows."""

import pytest

from benchmarks import soak


def test_growth_is_seen():
    flat = [{"step": n, "memory": 1000 + n % 2, "open files": 9} for n in range(60)]
    assert not any(row["grows"] for row in soak.grown(flat))
    for name, by in (("memory", 9), ("open files", 1)):
        leak = [{**row, name: row[name] + by * (row["step"] // 5)} for row in flat]
        assert [row["what"] for row in soak.grown(leak) if row["grows"]] == [name]


def test_memory_may_grow_by_what_orbax_alone_keeps():
    row = {"what": "memory", "early": 10**9, "late": 10**9 + 5 * 10**7, "steps": 100_000}
    saves = row["steps"] / soak.SAVE_EVERY
    for per_save, grows in ((0.0, True), (2e7 / saves, True), (4e7 / saves, False)):
        (judged,) = soak.judged([row], per_save)
        assert judged["grows"] is grows
    # Only memory: Orbax is no excuse for open files.
    (files,) = soak.judged([{**row, "what": "open files"}], 1e9)
    assert files["grows"]


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_two_minutes():
    found = soak.soak(120)
    assert len(found) >= 12
    rows = soak.judged(soak.grown(found), soak.orbax_alone(20, 60))
    assert [row for row in rows if row["grows"]] == []
