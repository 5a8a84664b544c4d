"""Writes model_card.md of a bundle: what the model is, from which data, and how well it did."""

from collections.abc import Mapping
from typing import Any


def card(signature: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """Returns the page as Markdown.

    Args:
        signature: the content of signature.json.
        facts: sections of the page, {title: {name: value}}.
    """
    origin = signature["origin"]
    lines = [f"# {origin['model']} at step {origin['step']:,}", ""]
    outputs = [
        f"{o['name']} ({o['kind']}" + (f", given {o['given']})" if o["given"] else ")")
        for o in signature["outputs"]
    ]
    lines += [
        f"Exported by jaxrank {origin['jaxrank_version']} from `{origin['checkpoint']}`.",
        "",
        f"- Outputs: {', '.join(outputs)}.",
        f"- Raw columns: {', '.join(column['name'] for column in signature['columns'])}.",
        f"- Rows: {sum(stack['rows'] for stack in signature['stacks']):,} in"
        f" {len(signature['tables'])} tables, stored as {signature['stacks'][0]['dtype']}."
        if signature["stacks"]
        else "- No tables.",
    ]
    for title, values in facts.items():
        lines += ["", f"## {title}", "", "| | |", "| --- | --- |"]
        lines += [f"| {name} | {_shown(value)} |" for name, value in values.items()]
    return "\n".join(lines) + "\n"


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
