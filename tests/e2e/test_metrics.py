"""The catalogue of metrics names what the code makes, and Prometheus accepts what the gateway serves."""

import os
import re
import shutil
import subprocess

import pytest

from conftest import CHECKOUT
from metrics_catalogue import NAME, check_scrape, names_in_catalogue


def names_in_code():
    found = set()
    for folder in ("gateway", "shard_worker", "engram_service"):
        for path, _, files in os.walk(os.path.join(CHECKOUT, folder)):
            for name in files:
                if name.endswith((".cc", ".h")) and not name.endswith("_test.cc"):
                    with open(os.path.join(path, name)) as file:
                        found.update(re.findall(f'"({NAME})"', file.read()))
    return found


def test_the_catalogue_names_what_the_code_makes():
    assert names_in_catalogue() == names_in_code()


def test_served_names_are_in_the_catalogue(cluster):
    served = set(re.findall(r"^# TYPE (\S+)", cluster.get("/metrics"), re.M))
    assert len(served) > 30
    assert served <= names_in_catalogue()


def test_labels_are_in_the_catalogue(cluster):
    """Also of what has not happened yet: every cause has its counter from the start. The other programs: life's test_local_cluster."""
    assert len(check_scrape("gateway", cluster.get("/metrics"))) > 30


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
