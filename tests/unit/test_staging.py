"""Writes of the host to the device: one packet a step, with the result of plain assignments."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from quire.worker.staging import Staging


def test_a_packet_writes_what_assignments_write() -> None:
    rng, staging = random.Random(0), Staging(torch.device("cpu"), 2)
    target = torch.zeros(500, dtype=torch.int32)
    wanted = np.zeros(500, np.int32)
    for count in (1, 16, 17, 3, 200, 5, 200):
        places = np.array(rng.sample(range(500), count))
        values = np.array([rng.randrange(1 << 30) for _ in places])
        at = rng.randint(0, count)
        staging.begin()
        staging.write(target, [places[:at], places[at:]], [values[:at].astype(np.int32), values[at:]])
        wanted[places] = values
        assert target.tolist() == wanted.tolist()


def test_a_step_writes_once() -> None:
    staging, target = Staging(torch.device("cpu"), 1), torch.zeros(4, dtype=torch.int32)
    staging.begin()
    staging.write(target, [np.array([1])], [np.array([5])])
    with pytest.raises(AssertionError, match="second write"):
        staging.write(target, [np.array([2])], [np.array([5])])
