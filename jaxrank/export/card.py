"""Writes model_card.md of a bundle: what the model is, from which data, and how well it did."""

from collections.abc import Mapping
from typing import Any

from jaxrank.export.comparison.check import Checked
from jaxrank.json_files import to_text

_SCORE = "A score orders the candidates of a request. It has no calibration and is no probability."


def card(signature: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """Returns the page as Markdown.

    Args:
        signature: the content of signature.json.
        facts: sections of the page, see `results`.
    """
    origin = signature["origin"]
    lines = [f"# {origin['model']} at step {origin['step']:,}", ""]
    outputs = [
        f"{o['name']} ({o['meaning']}" + (f", given {o['parent']})" if o["parent"] else ")")
        for o in signature["outputs"]
    ]
    scores = [o["name"] for o in signature["outputs"] if o["meaning"] == "score"]
    lines += [
        f"Exported by jaxrank {origin['jaxrank_version']} from `{origin['checkpoint']}`.",
        "",
        f"- Outputs: {', '.join(outputs)}.",
        *([f"- Trained by ranking alone: {', '.join(scores)}. {_SCORE}"] if scores else []),
        f"- Rows: {sum(stack['rows'] for stack in signature['stacks']):,} in"
        f" {len(signature['tables'])} tables, stored as {signature['stacks'][0]['dtype']}."
        if signature["stacks"]
        else "- No tables.",
    ]
    lines += ["", "## Columns of a request", "", "| | type | place | if it is omitted |"]
    lines += ["| --- | --- | --- | --- |"]
    lines += [_column(column) for column in signature["columns"]]
    for title, values in {**data_facts(signature["statistics"]), **facts}.items():
        lines += ["", f"## {title}", "", "| | |", "| --- | --- |"]
        lines += [f"| {name} | {_shown(value)} |" for name, value in values.items()]
    return "\n".join(lines) + "\n"


def _column(column: Mapping[str, Any]) -> str:
    kind = f"list of {column['type']}" if column["is_list"] else column["type"]
    place = {"any": "context or candidate"}.get(column["source"], column["source"])
    omitted = "rejected" if column["required"] else f"`{to_text(column['default'])}`"
    if column["now"]:
        omitted = "the time of the request"
    return f"| {column['name']} | {kind} | {place} | {omitted} |"


def data_facts(statistics: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the sections of the page about the data, {title: {name: value}}."""
    if statistics["rows"] is None:
        return {}
    split, rows = statistics["split"], statistics["rows"]
    labels, scores = {}, {}
    for task in statistics["tasks"]:
        name = task["task"]
        if task["label_mean"] is not None:
            labels[f"{name}, mean label"] = task["label_mean"]
        if task["score_mean"] is not None:
            scores[f"{name}, mean score"] = task["score_mean"]
        scores |= {f"{name}/{metric}": value for metric, value in task["metrics"].items()}
    features = {}
    for entry in statistics["features"]:
        shares = [f"{entry[k]:.1%} {k}" for k in ("missing", "unknown") if entry[k]]
        if entry["mean_length"] not in (None, 1):
            shares.append(f"{entry['mean_length']:.3g} ids")
        features[entry["name"]] = ", ".join(shares) or "complete"
    facts = {f"Labels of {rows:,} rows of {split}": labels}
    if scores:
        facts[f"Scores of {statistics['scored_rows']:,} rows of {split}"] = scores
    return {**facts, f"Features of {split}": features}


def results(
    checked: Checked, tables: str, worse_than_constant: list[str]
) -> dict[str, dict[str, Any]]:
    """Returns the sections of the page about the checks, {title: {name: value}}.

    tables: dtype of the stored rows.
    """
    comparison = {
        "raw rows": checked.parity.rows,
        "largest difference": checked.parity.difference,
    }
    if checked.parity.rounding is not None:
        comparison["largest difference from training precision"] = checked.parity.rounding
    facts: dict[str, dict[str, Any]] = {"Comparison with the trained program": comparison}
    if rounding := checked.validation.rounding:
        facts[f"Change by {tables} tables, on the validation data"] = {
            f"{task}/{name}": change
            for task, changes in rounding.items()
            for name, change in changes.items()
        }
    if checked.latency_ms:
        facts["Latency of a request when it was exported, in ms"] = {
            f"{count:,} candidates, {name.removesuffix('_ms')}": value
            for count, times in checked.latency_ms.items()
            for name, value in times.items()
        }
    if worse_than_constant:
        facts["Warnings"] = {"worse than a constant": ", ".join(worse_than_constant)}
    return facts


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
