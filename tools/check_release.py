"""Whether a tag may be released: it is the package's version, and the changelog has it dated."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSION = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)


def main() -> None:
    """Check the tag that was given."""
    tag = sys.argv[1]
    found = VERSION.search((ROOT / "src" / "kvatlas" / "__init__.py").read_text())
    if not found:
        raise SystemExit("src/kvatlas/__init__.py has no __version__")
    version = found[1]
    if tag != f"v{version}":
        raise SystemExit(f"The tag is {tag or 'missing'}, the version {version}. Tag v{version}.")
    heading = re.compile(rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$", re.MULTILINE)
    if not heading.search((ROOT / "CHANGELOG.md").read_text()):
        raise SystemExit(f"CHANGELOG.md has no heading '## {version} (YYYY-MM-DD)'.")
    print(f"{tag} may be released")


if __name__ == "__main__":
    main()
