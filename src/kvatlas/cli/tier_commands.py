"""The commands of `kvatlas tier`."""

from __future__ import annotations

from kvatlas.cli.tier_app import tier_app, tier_command
from kvatlas.cli.tier_archives import export, import_archive
from kvatlas.cli.tier_copy import copy
from kvatlas.cli.tier_gc import gc
from kvatlas.cli.tier_ls import ls
from kvatlas.cli.tier_serve import serve
from kvatlas.cli.tier_stat import stat
from kvatlas.cli.tier_verify import verify_objects

__all__ = ["tier_app"]

tier_command("ls", "ls folder:///mnt/kv", "ls 'mooncake://10.0.0.1:50051?metrics=10.0.0.1:9003'")(
    ls
)
tier_command("stat", "stat folder:///mnt/kv")(stat)
tier_command("verify", "verify folder:///mnt/kv --remove")(verify_objects)
tier_command(
    "gc", "gc folder:///mnt/kv", "gc folder:///mnt/kv --tenant 6f1ed002ab5595859014ebf0951522d9"
)(gc)
tier_command("copy", "copy folder:///mnt/kv --prefix tokens.json --to folder:///mnt/other")(copy)
tier_command("export", "export folder:///mnt/kv prefixes.tar")(export)
tier_command("import", "import folder:///mnt/kv prefixes.tar")(import_archive)
tier_command(
    "serve",
    "serve /var/cache/kvatlas/prefixes.tier",
    "serve prefixes.tier --model Qwen3-8B --memory 64GiB",
)(serve)
