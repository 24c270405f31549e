"""Hooks of MkDocs: Mermaid becomes part of the site, with its licence, and options of commands are not broken."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

MERMAID = Path(__file__).parents[1] / ".docs-venv" / "mermaid"
BLOCK_OR_CODE = re.compile(r"<pre.*?</pre>|(?<=<code>)[^<]+(?=</code>)", re.DOTALL)
OPTION = re.compile(r"(?<![\w-])--?\w[\w-]*")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the files that do not lie in docs/."""
    for name in ("LICENSE", "dist/mermaid.min.js"):
        source = MERMAID / name
        files.append(File.generated(config, f"assets/mermaid/{source.name}", abs_src_path=str(source)))
    return files


def on_page_content(html: str, **_: object) -> str:
    """Mark options such as --help in running text: browsers break lines after hyphens, extra.css forbids it."""
    return BLOCK_OR_CODE.sub(_mark_options, html)


def _mark_options(found: re.Match[str]) -> str:
    text = found.group()
    return text if text.startswith("<pre") else OPTION.sub(r'<span class="option">\g<0></span>', text)
