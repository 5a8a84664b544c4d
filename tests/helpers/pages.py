"""The code blocks of the pages of docs/, and how a user would run them.

A line `<!-- not run: REASON -->` or `<!-- run by FILE_test.py: NAME -->` before a block, or at the
top of a page for all its blocks, says that it is not run here. Blocks of `text`, `json` and other
languages are shown only.
"""

import contextlib
import io
import json
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from checkout import ROOT

from jaxrank import cli

DOCS = ROOT / "docs"
RUNNABLE = ("bash", "python")
_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"<!-- ((?:(?!-->).)*) -->\s*\Z", re.DOTALL)


class Block(NamedTuple):
    """A fenced block: its language and text, and the comment before it."""

    page: Path
    line: int
    language: str
    text: str
    mark: str

    def __str__(self):
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def is_skipped(self):
        return self.language not in RUNNABLE or self.mark.startswith(("not run: ", "run by "))


def blocks(page):
    """Returns the blocks of a page in order."""
    text = page.read_text()
    top = re.match(r"<!-- (not run: .*?|run by .*?) -->", text, re.DOTALL)
    result = []
    for match in _FENCE.finditer(text):
        mark = _MARK.search(text[: match.start()])
        indent = match[1]
        body = "".join(line.removeprefix(indent) for line in match[3].splitlines(keepends=True))
        comment = mark[1] if mark else top[1] if top else ""
        line = text[: match.start()].count("\n") + 1
        result.append(Block(page, line, match[2], body, comment))
    return result


def marked(name, mark):
    """Returns the text of the one block of a page with a mark."""
    (block,) = [block for block in blocks(DOCS / name) if block.mark == mark]
    return block.text


def run_page(page, folder, flags):
    """Runs the blocks of a page in the working directory, and returns the JSON of each verb.

    Args:
        flags: {verb: flags that are added to its commands}.
    """
    results, names = [], {}
    for block in blocks(page):
        if block.is_skipped():
            continue
        try:
            if block.language == "bash":
                results += _run_commands(block.text, flags)
            else:
                _run_python(block.text, folder, names)
        except (Exception, SystemExit) as error:
            raise AssertionError(f"{block}: {error!r}") from error
    return results


def _run_python(text, folder, names):
    file = re.match(r"# ([\w/]+\.py)\n", text)
    if file:
        (folder / file[1]).write_text(text)
    else:
        exec(compile(text, "<page>", "exec"), names)


def _run_commands(text, flags):
    results = []
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[:2] == ["[", "-e"] and words[3:5] == ["]", "||"]:
            words = [] if Path(words[2]).exists() else words[5:]
        if not words:
            continue
        program, *args = words
        if program == "jaxrank":
            args, _, file = " ".join(map(shlex.quote, args)).partition(" '>' ")
            verb, *rest = shlex.split(args)
            more = [] if "--json" in rest else ["--json"]
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                cli.run([verb, *rest, *flags.get(verb, []), *more])
            last = output.getvalue().splitlines()[-1]
            results.append((verb, json.loads(last)))
            if file:
                Path(file).write_text(last)
        elif program == "python":
            _run_file(args)
        else:
            subprocess.run(["bash", "-euc", line], check=True, capture_output=True)
    return results


def _run_file(args):
    """Runs a Python file with arguments, as `python FILE ...` does."""
    before = sys.argv
    sys.argv = list(args)
    try:
        runpy.run_path(args[0], run_name="__main__")
    finally:
        sys.argv = before
