"""All environment variables that Gristmill reads, in one place.

| variable | meaning |
|---|---|
| GRISTMILL_PACK_PATH | folders of packs, searched before the installed ones; separated like PATH |
"""

from __future__ import annotations

import os
from pathlib import Path


def pack_path() -> list[Path]:
    """Folders named by GRISTMILL_PACK_PATH."""
    return [Path(part) for part in os.environ.get("GRISTMILL_PACK_PATH", "").split(os.pathsep) if part]
