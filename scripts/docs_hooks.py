"""Hooks of MkDocs: Mermaid, which scripts/docs.sh has fetched, becomes part of the site, with its licence."""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

MERMAID = Path(__file__).parents[1] / ".docs-venv" / "mermaid"


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds the files that do not lie in docs/."""
    for name in ("LICENSE", "dist/mermaid.min.js"):
        source = MERMAID / name
        files.append(File.generated(config, f"assets/mermaid/{source.name}", abs_src_path=str(source)))
    return files
