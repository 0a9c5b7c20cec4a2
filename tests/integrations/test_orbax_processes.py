"""What the processes of a run tell each other."""

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from halfstep._base.processes import gather_texts

pytestmark = pytest.mark.core


@pytest.mark.parametrize("text", ["", "a message", "äöü", " ".join(map(str, range(2000)))])
def test_texts_of_any_length_arrive_whole(text: str, monkeypatch: pytest.MonkeyPatch):
    # Two processes that say the same: the shapes that are gathered are then equal, as they must be.
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost_utils, "process_allgather", lambda own: np.stack([own, own]))
    assert gather_texts(text) == [text, text]
