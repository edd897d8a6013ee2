"""The Grafana dashboard as the tests read it."""

from __future__ import annotations

import json
from pathlib import Path

DASHBOARD = Path(__file__).resolve().parents[1] / "deploy/grafana/dashboards/quire.json"
_VARIABLES = {"$__rate_interval": "5m", "$model": ".*"}


def expressions() -> list[str]:
    """The queries of all panels, with Grafana's variables filled in."""
    found = []
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", []):
            text = target["expr"]
            for variable, value in _VARIABLES.items():
                text = text.replace(variable, value)
            assert "$" not in text, text
            found.append(text)
    return found
