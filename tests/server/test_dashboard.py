"""What the Grafana dashboard asks for is what /metrics has."""

from __future__ import annotations

import re

import pytest
from serving import Server

from dashboard import metric_names


def test_every_metric_of_the_dashboard_is_there(dry: Server) -> None:
    answer = dry.http.get("/metrics")
    if answer.status_code == 404:
        pytest.skip("this server has no /metrics")
    # A family whose labels are not known before something happens has no samples yet, but a type.
    found = set(re.findall(r"^# TYPE (\S+)", answer.text, re.MULTILINE))
    found |= set(re.findall(r"^([\w:]+)[{ ]", answer.text, re.MULTILINE))
    assert metric_names() - found - {f"{name}_total" for name in found} == set()
