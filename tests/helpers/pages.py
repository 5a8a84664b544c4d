"""The code blocks of the pages of docs/, and how a user would run them.

A line `<!-- not run: REASON -->` or `<!-- run by FILE_test.py: NAME -->` before a block, or at the
top of a page for all its blocks, says that it is not run here. Blocks of `text`, `json` and other
languages are shown only.
"""

import contextlib
import io
import json
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import urllib.request
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


def run_page(page, folder, flags, *, compare=False):
    """Runs the blocks of a page in the working directory, and returns the JSON of each verb.

    Args:
        flags: {verb: flags that are added to its commands}.
        compare: whether each block of `text` must be what the block before it has printed.
    """
    results, names, printed = [], {}, ""
    for block in blocks(page):
        if compare and block.language == "text":
            assert not (missing := not_printed(block.text, printed)), f"{block}: {missing}"
        if block.is_skipped():
            continue
        output = io.StringIO()
        try:
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                if block.language == "bash":
                    results += _run_commands(block.text, flags)
                else:
                    _run_python(block.text, folder, names)
        except (Exception, SystemExit) as error:
            raise AssertionError(f"{block}: {error!r}\n{output.getvalue()}") from error
        printed = output.getvalue()
        print(printed)
    return results


_NUMBER = re.compile(r"-?\d[\d,]*\.?\d*")
TOLERANCE = 0.0005, 0.005  # absolute and relative: processors of another kind round differently


def not_printed(text, printed):
    """Returns the lines of a text that are not among printed lines, but for rounding."""
    lines = [_divided(line) for line in printed.splitlines()]
    return [line for line in text.splitlines() if not any(map(_same(line), lines))]


def _divided(line):
    """Returns a line without numbers and with single spaces, and its numbers."""
    numbers = [float(number.replace(",", "")) for number in _NUMBER.findall(line)]
    return " ".join(_NUMBER.sub("#", line).split()), numbers


def _same(line):
    shape, numbers = _divided(line)
    absolute, relative = TOLERANCE

    def same(other):
        return other[0] == shape and all(
            abs(a - b) <= max(absolute, relative * abs(a))
            for a, b in zip(numbers, other[1], strict=True)
        )

    return same


def _run_python(text, folder, names):
    file = re.match(r"# ([\w/]+\.py)\n", text)
    if file:
        (folder / file[1]).write_text(text)
    else:
        exec(compile(text, "<page>", "exec"), names)


def _run_commands(text, flags):
    """Runs commands. A server runs until the end of the block, at any free port."""
    results, port = [], 0
    with contextlib.ExitStack() as stack:
        for line in _statements(text):
            if line.startswith("jaxrank serve "):
                port = stack.enter_context(_serving(shlex.split(line)[2:]))
            elif line.startswith("curl "):
                results.append(("curl", _answer(shlex.split(line), port)))
            else:
                results += _run_command(line, flags)
    return results


def _statements(text):
    """Yields the commands of a block, also those joined by `&&`. Quotes may span lines."""
    lines = ""
    for line in text.replace("\\\n", " ").replace("&&\n", "&& ").splitlines():
        lines += f"{line}\n"
        with contextlib.suppress(ValueError):  # no closing quotation
            shlex.split(lines, comments=True)
            yield from lines.split(" && ")  # the first that fails ends the test
            lines = ""
    assert not lines, lines


def _run_command(line, flags):
    words = shlex.split(line, comments=True)
    if words[:2] == ["[", "-e"] and words[3:5] == ["]", "||"]:
        words = [] if Path(words[2]).exists() else words[5:]
    if not words:
        return []
    program, *args = words
    if program == "jaxrank":
        args, _, file = " ".join(map(shlex.quote, args)).partition(" '>' ")
        verb, *rest = shlex.split(args)
        more = [] if "--json" in rest else ["--json"]
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            cli.run([verb, *rest, *flags.get(verb, []), *more])
        last = output.getvalue().splitlines()[-1]
        if file:
            Path(file).write_text(last)
        return [(verb, json.loads(last))]
    if program == "python":
        _run_file(args)
    else:
        subprocess.run(["bash", "-euc", line], check=True, capture_output=True)
    return []


@contextlib.contextmanager
def _serving(args):
    """Runs `jaxrank serve` until the context ends, by a signal, and yields its port."""
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'serving'}"}
    args = [arg for arg in args if not arg.startswith("--port=")]
    command = [sys.executable, "-m", "jaxrank", "serve", *args, "--port=0"]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = next((line for line in process.stdout if "Serving" in line), "")
            yield int(re.search(r"http://127.0.0.1:(\d+)$", line)[1])
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()


def _answer(words, port):
    """Returns the answer to `curl -s localhost:8080/PATH -d DATA`."""
    _, _, url, _, data = words
    url = url.replace("localhost:8080", f"http://127.0.0.1:{port}")
    with urllib.request.urlopen(url, data.encode(), timeout=60) as answer:
        return json.load(answer)


def _run_file(args):
    """Runs a Python file with arguments, as `python FILE ...` does."""
    before = sys.argv
    sys.argv = list(args)
    try:
        runpy.run_path(args[0], run_name="__main__")
    finally:
        sys.argv = before
