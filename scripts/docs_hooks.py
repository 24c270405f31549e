"""Hook of MkDocs: options of commands are not broken."""

import re

BLOCK_OR_CODE = re.compile(r"<pre.*?</pre>|(?<=<code>)[^<]+(?=</code>)", re.DOTALL)
OPTION = re.compile(r"(?<![\w-])--?\w[\w-]*")


def on_page_content(html: str, **_: object) -> str:
    """Mark options such as --help in running text: browsers break lines after hyphens, extra.css forbids it."""
    return BLOCK_OR_CODE.sub(_mark_options, html)


def _mark_options(found: re.Match[str]) -> str:
    text = found.group()
    return text if text.startswith("<pre") else OPTION.sub(r'<span class="option">\g<0></span>', text)
