"""deploy/METRICS.md, read as the tests need it, and what a scrape holds in the same form."""

import os
import re

CHECKOUT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
NAME = r"(?:dsv_|vllm:|http_re)[a-z0-9_:]+"


def catalogue():
    with open(os.path.join(CHECKOUT, "deploy/METRICS.md")) as file:
        return file.read()


def names_in_catalogue():
    return set(re.findall(f"`({NAME})`", catalogue()))


def labels_in_catalogue(program):
    """{name: {label: the values it has, or None where they depend}} of the program's table."""
    table = catalogue().split(f"## {program}\n")[1].split("\n## ")[0]
    found = {}
    for name, cells in re.findall(rf"^\| `({NAME})` \| \w+ \|(.*)\|$", table, re.M):
        *other, labels, _ = cells.split("|")  # only the gateway's series have other names
        own = {label: set(values.split(", ")) if values else None for label, values in re.findall(r"`(\w+)`(?: \(([^)]*)\))?", labels)}
        found[name] = own
        if other and other[0].strip():
            also = {"finished_reason" if label == "finish_reason" else label: values for label, values in own.items()}
            found[other[0].strip(" `")] = {**also, "model_name": None, "engine": None}
    return found


def labels_served(text):
    """{name: {label: values}} of a scrape; `le` belongs to the format, exposer_ to the library."""
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)", text, re.M))
    found = {}
    for series, labels in re.findall(r"^([a-zA-Z_:0-9]+)(?:\{([^}]*)\})? ", text, re.M):
        base = re.sub(r"_(bucket|sum|count)$", "", series)
        name = base if kinds.get(base) in ("histogram", "summary") else series
        if name.startswith("exposer_"):
            continue
        values = found.setdefault(name, {})
        for label, value in re.findall(r'(\w+)="([^"]*)"', labels):
            if label != "le":
                values.setdefault(label, set()).add(value)
    return found


def check_scrape(program, text):
    """Names, labels and the values that are listed: no more than the catalogue has, and of each series all of them."""
    listed, served = labels_in_catalogue(program), labels_served(text)
    assert served and served.keys() <= listed.keys(), f"{program}: {sorted(served.keys() - listed.keys())} are not in the catalogue"
    for name, labels in served.items():
        assert labels.keys() == listed[name].keys(), f"{program}: {name}"
        for label, values in labels.items():
            if listed[name][label] is not None:
                assert values == listed[name][label], f"{program}: {name}, {label}"
    return served
