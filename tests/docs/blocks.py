"""The blocks of Python in README.md and docs/.

A *program* calls `hvd.init()` and defines all names that it uses; it runs by itself. Any other block is a *fragment*,
and runs among the names that a context prepares (`tests/docs/torch_context.py` and its like). A comment
before a block, `<!-- not run: why -->`, leaves it out of both.
"""

from __future__ import annotations

import ast
import builtins
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>python|diff)$")
INCLUDED = re.compile(r'--8<-- "(?P<path>[^"]+)"')


@dataclass(frozen=True)
class Block:
    """A fenced block; `code`: of a diff, what it leaves. `included`: the file that is shown, or ""."""

    page: str
    line: int
    code: str
    is_diff: bool
    is_run: bool
    included: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.code)

    @property
    def framework(self) -> str:
        without_comments = ast.unparse(self.tree)
        if "horovod_oktopk.distributed" in without_comments:
            return "distributed"
        return "tensorflow" if re.search(r"tensorflow|keras|\btf\.", without_comments) else "torch"

    @property
    def is_program(self) -> bool:
        return "hvd.init(" in self.code and not self.missing_names()

    def missing_names(self) -> set[str]:
        """Return the names that the block uses and does not define."""
        defined, used = set(dir(builtins)), set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Name):
                (used if isinstance(node.ctx, ast.Load) else defined).add(node.id)
            elif isinstance(node, ast.alias):
                defined.add((node.asname or node.name).split(".")[0])
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                defined.add(node.name)
            elif isinstance(node, ast.arg):
                defined.add(node.arg)
        return used - defined


def blocks_of(path: Path) -> Iterator[Block]:
    lines = path.read_text().splitlines()
    for start, line in enumerate(lines):
        if fence := FENCE.match(line):
            end = lines.index(f"{fence['indent']}```", start)
            code = textwrap.dedent("\n".join(lines[start + 1:end])) + "\n"
            included = INCLUDED.fullmatch(code.strip())
            if included:
                code = (ROOT / included["path"]).read_text()
            is_diff = fence["language"] == "diff"
            if is_diff:
                code = "\n".join(line[1:] for line in code.splitlines() if not line.startswith("-")) + "\n"
            is_run = not is_diff and not included and "<!-- not run:" not in "".join(lines[max(0, start - 2):start])
            yield Block(str(path.relative_to(ROOT)), start + 1, code, is_diff, is_run,
                        included["path"] if included else "")


BLOCKS = [block for path in PAGES for block in blocks_of(path)]
PROGRAMS = [block for block in BLOCKS if block.is_run and block.is_program]
FRAGMENTS = [block for block in BLOCKS if block.is_run and not block.is_program]
