"""Steps without end: nothing grows."""

import pytest

from benchmarks import soak


def test_growth_is_seen():
    flat = [{"step": n, "memory": 1000 + n % 2, "open files": 9} for n in range(60)]
    assert not any(row["grows"] for row in soak.grown(flat))
    for name, by in (("memory", 9), ("open files", 1)):
        leak = [{**row, name: row[name] + by * (row["step"] // 5)} for row in flat]
        assert [row["what"] for row in soak.grown(leak) if row["grows"]] == [name]


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_two_minutes():
    found = soak.soak(120)
    assert len(found) >= 12
    assert [row for row in soak.grown(found) if row["grows"]] == []
