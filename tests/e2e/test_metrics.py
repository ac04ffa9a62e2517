"""The catalogue of metrics names what the code makes, and Prometheus accepts what the gateway serves."""

import os
import re
import shutil
import subprocess

import pytest

from conftest import CHECKOUT

NAME = r"(?:dsv_|vllm:|http_re)[a-z0-9_:]+"


def names_in_code():
    found = set()
    for folder in ("gateway", "shard_worker", "engram_service"):
        for path, _, files in os.walk(os.path.join(CHECKOUT, folder)):
            for name in files:
                if name.endswith((".cc", ".h")) and not name.endswith("_test.cc"):
                    with open(os.path.join(path, name)) as file:
                        found.update(re.findall(f'"({NAME})"', file.read()))
    return found


def names_in_catalogue():
    with open(os.path.join(CHECKOUT, "deploy/METRICS.md")) as file:
        return set(re.findall(f"`({NAME})`", file.read()))


def test_the_catalogue_names_what_the_code_makes():
    assert names_in_catalogue() == names_in_code()


def test_served_names_are_in_the_catalogue(cluster):
    served = set(re.findall(r"^# TYPE (\S+)", cluster.get("/metrics"), re.M))
    assert len(served) > 30
    assert served <= names_in_catalogue()


def labels_in_catalogue():
    """{name: {label: the values it has, or None where they depend}} of the gateway's table."""
    with open(os.path.join(CHECKOUT, "deploy/METRICS.md")) as file:
        table = file.read().split("## gateway")[1].split("\n## ")[0]
    found = {}
    for name, other, labels in re.findall(rf"^\| `({NAME})` \| \w+ \|([^|]*)\|([^|]*)\|", table, re.M):
        own = {label: set(values.split(", ")) if values else None for label, values in re.findall(r"`(\w+)`(?: \(([^)]*)\))?", labels)}
        found[name] = own
        if other.strip():
            also = {"finished_reason" if label == "finish_reason" else label: values for label, values in own.items()}
            found[other.strip(" `")] = {**also, "model_name": None, "engine": None}
    return found


def labels_served(text):
    """{name: {label: values}} of a scrape; `le` belongs to the format."""
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)", text, re.M))
    found = {}
    for series, labels in re.findall(r"^([a-zA-Z_:0-9]+)(?:\{([^}]*)\})? ", text, re.M):
        base = re.sub(r"_(bucket|sum|count)$", "", series)
        name = base if kinds.get(base) == "histogram" else series
        values = found.setdefault(name, {})
        for label, value in re.findall(r'(\w+)="([^"]*)"', labels):
            if label != "le":
                values.setdefault(label, set()).add(value)
    return found


def test_labels_are_in_the_catalogue(cluster):
    """Also of what has not happened yet: every cause has its counter from the start."""
    listed, served = labels_in_catalogue(), labels_served(cluster.get("/metrics"))
    assert len(served) > 30 and served.keys() <= listed.keys()
    for name, labels in served.items():
        assert labels.keys() == listed[name].keys(), name
        for label, values in labels.items():
            if listed[name][label] is not None:
                assert values == listed[name][label], f"{name}, {label}"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_our_names(cluster):
    lines = [line for line in cluster.get("/metrics").splitlines(keepends=True) if "vllm:" not in line]
    check = subprocess.run(["promtool", "check", "metrics"], input="".join(lines), capture_output=True, text=True)
    assert check.returncode == 0, check.stdout + check.stderr


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_minds_only_what_is_not_ours(cluster):
    """Names under vllm: are vLLM's. METRICS.md says what a lint finds in them; anything else is ours to mend."""
    check = subprocess.run(["promtool", "check", "metrics"], input=cluster.get("/metrics"), capture_output=True, text=True)
    expected = ["metric names should not contain ':'", 'vllm:iteration_tokens_total non-counter metrics should not have "_total" suffix']
    found = [line for line in check.stderr.splitlines() if line.strip()]
    assert found
    assert [line for line in found if not any(text in line for text in expected)] == []
    assert all(line.startswith("vllm:") for line in found)
    assert sum("iteration_tokens_total non-counter" in line for line in found) == 1
