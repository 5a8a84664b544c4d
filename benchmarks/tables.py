"""Writes the tables of docs/benchmarks from benchmarks/results/*.jsonl.

    python -m benchmarks.tables

A page marks a table, and what lies between the two comments is replaced:

    <!-- table: cpu rows=program columns=workload metric=step hardware="2 cores, wide" -->
    <!-- end of table -->

`cpu` names the file of results. `rows` and `columns` name the fields whose values become the rows
and columns. All other fields select results. If two results fall in one cell, the later line of the
file is shown, so that a new measurement is one appended line. `all` lists the results of every file
that have a `title`, with hardware, date, commit and command.
"""

import json
import pathlib
import re
import shlex

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = ROOT / "docs" / "benchmarks"
FIELDS = {
    "workload", "program", "metric", "value", "unit", "hardware", "date", "commit", "command",
    "note",
}  # fmt: skip
OPTIONAL = {"deviation", "title"}
_TABLE = re.compile(r"(<!-- table: (.*?) -->\n).*?(<!-- end of table -->)", re.DOTALL)

Result = dict[str, str]


def load(file: str) -> list[Result]:
    """Returns the results of one file. Numbers stay texts, so that no digit is lost."""
    lines = (RESULTS / f"{file}.jsonl").read_text().splitlines()
    results = [json.loads(line, parse_float=str, parse_int=str) for line in lines]
    for line, result in enumerate(results, 1):
        if "title" in result and not result["command"]:
            raise ValueError(
                f"{file}.jsonl, line {line}: a result with a title must have a command"
            )
        if FIELDS - result.keys() or result.keys() - FIELDS - OPTIONAL:
            raise ValueError(f"{file}.jsonl, line {line}: fields must be {sorted(FIELDS)}")
    return results


def number(text: str) -> str:
    """Formats a number with commas between thousands."""
    whole, _, fraction = text.partition(".")
    if len(whole) > 3:
        whole = f"{int(whole):,}"
    return f"{whole}.{fraction}" if fraction else whole


def _cell(result: Result) -> str:
    text = number(result["value"])
    return f"{text} ({result['deviation']})" if "deviation" in result else text


def _markdown(rows: list[list[str]], left: int) -> str:
    """Formats rows as a table whose columns after the first `left` are aligned right."""
    marks = ["---"] * left + ["---:"] * (len(rows[0]) - left)
    lines = [rows[0], marks, *rows[1:]]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def pivot(results: list[Result], rows: str, columns: str) -> str:
    """Formats results as a table with a row and a column for each value of two fields.

    Args:
        results: in the order of rows and columns.
        rows: a field, or several with commas between them, whose values are joined.
        columns: a field.
    """
    results = [r | {rows: ", ".join(r[field] for field in rows.split(","))} for r in results]
    cells = {(result[rows], result[columns]): result for result in results}
    heads = list(dict.fromkeys(result[columns] for result in results))
    units = {head: {r["unit"] for r in results if r[columns] == head} for head in heads}
    common = set.union(*units.values())
    corner = common.pop() if len(common) == 1 else ""
    titles = [
        head
        if corner or len(units[head]) > 1 or "" in units[head]
        else f"{head}, {min(units[head])}"
        for head in heads
    ]
    table = [[corner, *titles]]
    table += [
        [row, *(_cell(cells[row, head]) if (row, head) in cells else "" for head in heads)]
        for row in dict.fromkeys(result[rows] for result in results)
    ]
    return _markdown(table, 1)


def summary() -> str:
    """Formats the results of all files that have a title, one row for each title."""
    files = sorted(path.stem for path in RESULTS.glob("*.jsonl"))
    titled = {r["title"]: r for file in files for r in load(file) if "title" in r}
    table = [["workload", "hardware", "date", "commit", "command", "figure"]]
    for title, r in titled.items():
        figure = f"{_cell(r)} {r['unit']}".strip()
        command = f"`{r['command']}`"
        table.append([title, r["hardware"], r["date"], r["commit"], command, figure])
    return _markdown(table, 5)


def table(description: str) -> str:
    """Returns the table that the words of one comment describe."""
    file, *words = shlex.split(description)
    if file == "all":
        return summary()
    chosen = dict(word.split("=", 1) for word in words)
    rows, columns = chosen.pop("rows"), chosen.pop("columns")
    results = [
        r for r in load(file) if all(r[key] in value.split(";") for key, value in chosen.items())
    ]
    if not results:
        raise ValueError(f"no results in {file}.jsonl for: {description}")
    return pivot(results, rows, columns)


def fill(page: str) -> str:
    """Returns the text of a page with all its tables generated from the results."""
    return _TABLE.sub(lambda match: match[1] + table(match[2]) + match[3], page)


def main() -> None:
    for path in sorted(PAGES.glob("*.md")):
        path.write_text(fill(path.read_text()))


if __name__ == "__main__":
    main()
