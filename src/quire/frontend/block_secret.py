"""The secret from which the names of KV blocks derive. Engines that share it give equal blocks equal names."""

from __future__ import annotations

from pathlib import Path

from quire.config import EngineConfig
from quire.files.secret import folder_secret
from quire.types.block_names import new_secret


def block_secret(config: EngineConfig) -> bytes:
    """Return the secret of a deployment: that of the settings, else that of the folder of kv_disk, else a new one.

    Raises:
        ConfigError: if the folder of kv_disk cannot be used.
    """
    if config.cache_secret is not None:
        return bytes.fromhex(config.cache_secret)
    return new_secret() if config.kv_disk is None else folder_secret(Path(config.kv_disk))
