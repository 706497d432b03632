"""What deploy/ and docs/serving.md say is what the server has."""

from __future__ import annotations

import json
import re

import pytest

from medusa.infer.server.metrics import PREFIX
from medusa.infer.server.schema import ChatBody, CompletionBody, MedusaOptions


@pytest.fixture(scope="module")
def metric_names(served):
    with served.http() as http:
        http.post("/v1/completions", json={"prompt": "aaaaaaaa", "max_tokens": 60, "temperature": 0})
        served.wait_idle()
        text = http.get("/metrics").text
    return set(re.findall(r"^(medusa:\w+)", text, flags=re.MULTILINE))


def test_the_dashboard_asks_for_metrics_that_there_are(repo_root, metric_names):
    dashboard = json.loads((repo_root / "deploy" / "grafana-dashboard.json").read_text())
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"medusa:\w+", target["expr"])
    }
    assert len(asked) > 15 and asked <= metric_names
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places), "panels lie over each other"


def test_the_docs_name_every_metric_option_and_field(repo_root, metric_names):
    docs = (repo_root / "docs" / "serving.md").read_text()
    for name in metric_names:
        stem = re.sub(r"_(total|bucket|sum|count|created)$", "", name.removeprefix(PREFIX))
        assert f"`{stem}" in docs or f"{stem}_total" in docs, f"docs/serving.md does not name the metric {stem}"
    for field in {**CompletionBody.model_fields, **ChatBody.model_fields, **MedusaOptions.model_fields}:
        assert field in ("model", "user") or f"`{field}`" in docs, f"docs/serving.md does not name the field {field}"
    source = (repo_root / "medusa" / "cli_serve.py").read_text()
    for option in re.findall(
        r"^    (\w+): (?:Annotated|BaseOverride|DtypeOption|Device|TrustRemoteCode|Heads)", source, flags=re.MULTILINE
    ):
        assert f"--{option.replace('_', '-')}" in docs, f"docs/serving.md does not name the option {option}"


def test_the_unit_and_the_image_start_what_there_is(repo_root):
    unit = (repo_root / "deploy" / "medusa.service").read_text()
    options = set(re.findall(r"(--[a-z-]+)", unit + (repo_root / "deploy" / "Dockerfile").read_text()))
    source = (repo_root / "medusa" / "cli_serve.py").read_text() + (repo_root / "medusa" / "cli_options.py").read_text()
    ours = {option for option in options if option[2:].replace("-", "_") in source}
    assert {"--heads", "--base", "--host", "--port", "--api-key-file", "--log-format", "--drain-timeout"} <= ours
