"""The Grafana dashboard speaks of what /metrics says, and of all of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.server import rig

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana-dashboard.json"


def test_every_metric_of_the_dashboard_is_exposed_and_shown():
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    exprs = [target["expr"] for panel in panels for target in panel["targets"]]
    assert len(panels) > 10
    with rig.running() as server:
        server.complete(prompt="the cat the cat the cat", max_tokens=30, temperature=0)
        text = server.http.get("/metrics").text
    samples = [line for line in text.splitlines() if not line.startswith("#")]
    exposed = {re.match(r"\w+", line)[0] for line in samples}
    asked = {name for expr in exprs for name in re.findall(r"foretell_\w+", expr)}
    assert asked <= exposed, asked - exposed
    # Histograms are asked by their buckets, and the age of a counter is nobody's concern.
    rest = {name for name in exposed if not re.search(r"_(created|sum|count)$", name)}
    assert rest <= asked, rest - asked
    labels = {name for line in samples for name in re.findall(r'[{,](\w+)="', line)}
    shown = {label for expr in exprs for label in re.findall(r"by \((\w+)\)", expr)}
    assert shown <= labels, shown - labels
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_panels_do_not_overlap():
    cells: set[tuple[int, int]] = set()
    for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]:
        at = panel["gridPos"]
        own = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not own & cells
        assert at["x"] + at["w"] <= 24
        cells |= own
